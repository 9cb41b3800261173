/* Turns the HPL inside Debian's hpcc source into a program of its own: it reads hpccinf.txt (an HPL.dat by another
 * name) and appends its report to hpccoutf.txt. */
#include <stdio.h>
#include <string.h>
#include "hpl.h"

/* hpcc falls back to built-in parameters when its input is wrong; a benchmark must not. */
int HPCC_Defaults() {
  fprintf(stderr, "xhpl: bad input in hpccinf.txt\n");
  MPI_Abort(MPI_COMM_WORLD, 2);
  return 2;
}

int main(int argc, char **argv) {
  HPL_RuntimeData data;
  int failure = 0;
  memset(&data, 0, sizeof data);
  MPI_Init(&argc, &argv);
  HPL_main(argc, argv, &data, &failure);
  MPI_Finalize();
  return failure;
}
