"""Objects for the tests with llm-d's charts."""
