"""The only place where the stages meet and the loop closes."""
