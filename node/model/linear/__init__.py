"""Linear layers in other layouts: merged, packed for few rows, quantised."""
