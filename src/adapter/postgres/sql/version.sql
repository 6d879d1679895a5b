SELECT coalesce(max(version), 0) FROM {version_table}
