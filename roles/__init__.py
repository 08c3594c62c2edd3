"""Roles: each makes one part of a host what the plan says, and nothing where it is so already."""
