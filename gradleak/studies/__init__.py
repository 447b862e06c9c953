"""Studies: each composes audits, or attacks of one update."""
