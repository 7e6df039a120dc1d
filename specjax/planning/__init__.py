"""What decoding costs and what would pay: costs fitted to a few measured points, devices by their datasheets, and the
predictions from both."""
