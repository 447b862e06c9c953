"""The programs: flags in, one library call each."""
