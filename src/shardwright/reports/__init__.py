"""Pictures and pages for people: one offline page per plan, two plans side by side, pictures for papers."""

from shardwright.reports.page import plan_page
from shardwright.reports.picture import picture

__all__ = ["picture", "plan_page"]
