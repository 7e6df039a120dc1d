"""The decoding loop: prefill, then blocks (draft, verify, commit) until every row is done."""
