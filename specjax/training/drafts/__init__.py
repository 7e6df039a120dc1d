"""The section `draft` of a config, kind by kind: the description of a draft, and its first weights."""
