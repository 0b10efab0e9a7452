"""The stage server: opens sessions, carries rows through this stage, moves KV."""
