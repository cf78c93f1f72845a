"""Readers and solvers of problems that other people published, to check the product's searches against."""
