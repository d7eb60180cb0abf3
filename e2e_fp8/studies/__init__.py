"""Studies: arms that differ in named overrides, run with several seeds each, and a page of results. Starts runs, imports no stage."""
