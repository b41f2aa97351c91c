/* Routing of one layer. */
int route_version(void) { return 1; }
