"""Preflight: what a host is, judged against the plan and the catalogue before anything changes."""
