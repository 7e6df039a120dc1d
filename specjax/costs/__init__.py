"""Costs of decoding, and predictions of what pays: costs fitted to a few measured points, devices by their datasheets,
and predictions from both."""
