"""Types, the codec, and the messages of sessions, KV and peers."""
