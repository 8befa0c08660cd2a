"""Files: atomic replacement, and readers of JSON, TOML and YAML that refuse what is wrong in one line."""
