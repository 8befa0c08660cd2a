"""Running a sweep."""
