"""The endpoint picker: decides which pods serve a request, and by which path."""
