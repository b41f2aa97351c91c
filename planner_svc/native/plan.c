/* Placement plans. */
int plan_version(void) { return 1; }
