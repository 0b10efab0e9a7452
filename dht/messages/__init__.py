"""What travels: types, the codec, messages of sessions, KV and peers."""
