"""Model shapes from published configurations, and the names of the same module on the two sides."""
