/* Steps that are one raw system call, in raw.c. Zero if it could be done. */
int raw(const char *op, int words, char **w);
