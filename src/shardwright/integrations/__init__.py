"""Training loops of others, with parallelized modules: imported by name, so that nobody needs a library that is not used.

>>> from shardwright.integrations.trainer import Trainer                                        # doctest: +SKIP
"""
