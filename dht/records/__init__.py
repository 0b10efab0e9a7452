"""Signed records: checked, kept, read and written, asked of full peers."""
