"""The operators' formulas in plain torch: what tests compare against, and what to read first. Imports no operator."""
