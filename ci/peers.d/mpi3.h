/* Included before every file of HPL: two names that MPI-3 removed. */
#include <mpi.h>
#undef MPI_Address
#undef MPI_Type_struct
#define MPI_Address MPI_Get_address
#define MPI_Type_struct MPI_Type_create_struct
