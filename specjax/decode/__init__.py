"""Prefill, then (draft, verify, commit) until every row is done."""
