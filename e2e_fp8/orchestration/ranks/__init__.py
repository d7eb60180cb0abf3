"""The loop over several trainer ranks: rank 0 drives it, the others follow its orders."""
