/* What benches/fabric measures, by MPI: latency of 8 bytes there and back, halved, and bandwidth of windows of 4 in one
 * direction, until the target says that it has them all; medians over batches.
 *   net messages|put BATCHES        one line: latency in us, then 10^9 bytes a second by size */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 5000, WINDOW = 4, SIZES = 6 };
static const size_t sizes[SIZES] = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
static int me, batches;
static MPI_Win window;
static char *own, *mine, *source;

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static double median(double *times) {
  qsort(times, batches, sizeof *times, ascending);
  return times[batches / 2];
}

/* Credits, notices and puts all keep to what the armed-slot contract asks for: the target has said that the range is free
 * before it is written, and knows that it is full before it reads. */
static void put(size_t at, size_t len, int tag) {
  char word = 1;
  MPI_Put(source + at, (int)len, MPI_BYTE, 1 - me, at, (int)len, MPI_BYTE, window);
  MPI_Win_flush(1 - me, window);
  MPI_Send(&word, 1, MPI_BYTE, 1 - me, tag, MPI_COMM_WORLD);
}
static void notice(int tag) {
  char word;
  MPI_Recv(&word, 1, MPI_BYTE, 1 - me, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Win_sync(window);
}

static double latency(int one_sided) {
  double *times = calloc(batches, sizeof *times);
  for (int batch = -1; batch < batches; batch++) {
    double start = MPI_Wtime();
    for (int i = 0; i < ROUNDS; i++) {
      if (one_sided) {
        if (me == 0) put(0, 8, 1), notice(1);
        else notice(1), put(0, 8, 1);
      } else {
        MPI_Request r;
        MPI_Irecv(mine, 8, MPI_BYTE, 1 - me, 1, MPI_COMM_WORLD, &r);
        if (me == 1) MPI_Wait(&r, MPI_STATUS_IGNORE);
        MPI_Send(source, 8, MPI_BYTE, 1 - me, 1, MPI_COMM_WORLD);
        if (me == 0) MPI_Wait(&r, MPI_STATUS_IGNORE);
      }
    }
    if (batch >= 0) times[batch] = (MPI_Wtime() - start) / ROUNDS / 2 * 1e6;
  }
  return median(times);
}

static double stream(int one_sided, size_t len) {
  size_t puts = ((size_t)256 << 20) / len;
  puts = puts < WINDOW ? WINDOW : puts > 1000 ? 1000 : puts;
  double *times = calloc(batches, sizeof *times);
  for (int batch = -1; batch < batches; batch++) {
    MPI_Request under_way[WINDOW];
    char word = 1;
    double start = MPI_Wtime();
    for (int i = 0; i < WINDOW; i++) under_way[i] = MPI_REQUEST_NULL;
    if (me == 0) {
      for (size_t i = 0; i < puts; i++) {
        size_t at = i % WINDOW * len;
        if (one_sided) {
          if (i >= WINDOW) notice(3);
          put(at, len, 2);
        } else {
          if (i >= WINDOW && i % WINDOW == 0) MPI_Waitall(WINDOW, under_way, MPI_STATUSES_IGNORE);
          MPI_Isend(source + at, (int)len, MPI_BYTE, 1, 2, MPI_COMM_WORLD, &under_way[i % WINDOW]);
        }
      }
      MPI_Waitall(WINDOW, under_way, MPI_STATUSES_IGNORE);
      MPI_Recv(&word, 1, MPI_BYTE, 1, 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
      for (int i = 0; i < WINDOW && !one_sided; i++)
        MPI_Irecv(mine + i * len, (int)len, MPI_BYTE, 0, 2, MPI_COMM_WORLD, &under_way[i]);
      for (size_t i = 0; i < puts; i++) {
        int more = i + WINDOW < puts;
        if (one_sided) {
          notice(2);
          if (more) MPI_Send(&word, 1, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
        } else {
          MPI_Wait(&under_way[i % WINDOW], MPI_STATUS_IGNORE);
          if (more)
            MPI_Irecv(mine + i % WINDOW * len, (int)len, MPI_BYTE, 0, 2, MPI_COMM_WORLD, &under_way[i % WINDOW]);
        }
      }
      MPI_Send(&word, 1, MPI_BYTE, 0, 4, MPI_COMM_WORLD);
    }
    if (batch >= 0) times[batch] = puts * (double)len / (MPI_Wtime() - start) * 1e-9;
  }
  return median(times);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
  int one_sided = !strcmp(argv[1], "put");
  batches = atoi(argv[2]);
  size_t bytes = WINDOW * sizes[SIZES - 1];
  MPI_Win_allocate(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &own, &window);
  MPI_Win_lock_all(0, window);
  source = malloc(bytes);
  mine = one_sided ? own : malloc(bytes);
  memset(source, 1 + me, bytes);
  memset(mine, 0, bytes);
  MPI_Barrier(MPI_COMM_WORLD);
  double us = latency(one_sided);
  if (me == 0) printf("%.4f", us);
  for (int s = 0; s < SIZES; s++) {
    double rate = stream(one_sided, sizes[s]);
    if (me == 0) printf(" %.4f", rate);
  }
  if (me == 0) printf("\n");
  MPI_Win_unlock_all(window);
  MPI_Win_free(&window);
  MPI_Finalize();
  return 0;
}
