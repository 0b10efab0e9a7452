"""The rules of the papers that the project compares itself with, as published."""
