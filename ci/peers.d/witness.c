/* Two witnesses of the machine's mood, printed as Gflop/s summed over the threads, each thread on its own core:
 *   fma  independent multiply-adds on registers: what the cores can do at this clock;
 *   l2   a packed GEMM whose operands live in L2: falls with contended caches where `fma` does not.
 * usage: witness THREADS SECONDS        build: gcc -O3 -march=native -ffp-contract=fast -pthread */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
enum { W = 8, ROWS = 3, COLS = 8 }; /* 24 accumulators of 32 registers */
#elif defined(__AVX2__)
enum { W = 4, ROWS = 3, COLS = 4 }; /* 12 of 16 */
#else
enum { W = 2, ROWS = 4, COLS = 6 }; /* NEON: 24 of 32 */
#endif
typedef double vec __attribute__((vector_size(W * sizeof(double))));
enum { MR = W * ROWS, M = 144 / MR * MR, N = 144 / COLS * COLS, K = 256, MAX_THREADS = 64 };

static double seconds;
static int threads;
static double rate[MAX_THREADS][2];
static pthread_barrier_t together;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Twelve chains hide the latency (4 cycles) of up to three units. The empty asm pins each chain to a register. */
#if defined(__x86_64__)
#define PIN(v) __asm__ volatile("" : "+v"(v))
#else
#define PIN(v) __asm__ volatile("" : "+w"(v))
#endif
#define TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define START(i) vec acc##i = x + (double)i;
#define STEP(i) acc##i = acc##i * x + y; PIN(acc##i);

static double fma_rate(void) {
  vec x, y;
  for (int l = 0; l < W; l++) x[l] = 0.7512345, y[l] = 0.3123456;
  TWELVE(START)
  double start = now(), spent, flops = 0;
  do {
    for (int rep = 0; rep < 100000; rep++) {
      TWELVE(STEP)
    }
    flops += 100000.0 * 12 * W * 2;
    spent = now() - start;
  } while (spent < seconds);
  return flops / spent * 1e-9;
}

/* C[MR x COLS] += A(packed MR x K) * B(packed K x COLS) */
static void tile(const double *restrict a, const double *restrict b, double *restrict c) {
  vec acc[COLS][ROWS];
  memset(acc, 0, sizeof acc);
  for (int k = 0; k < K; k++, a += MR, b += COLS) {
    const vec *column = (const vec *)a;
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++)
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) acc[j][i] += column[i] * b[j];
  }
  vec *out = (vec *)c;
  for (int j = 0; j < COLS; j++)
    for (int i = 0; i < ROWS; i++) out[j * ROWS + i] += acc[j][i];
}

static double gemm_rate(void) {
  double *a = aligned_alloc(64, M * K * sizeof(double)), *b = aligned_alloc(64, K * N * sizeof(double)),
         *c = aligned_alloc(64, M * N * sizeof(double));
  if (!a || !b || !c) exit(1);
  for (int i = 0; i < M * K; i++) a[i] = 1.0 / (i + 3);
  for (int i = 0; i < K * N; i++) b[i] = 1.0 / (i + 7);
  memset(c, 0, M * N * sizeof(double));
  double start = now(), spent, flops = 0;
  do {
    for (int rep = 0; rep < 20; rep++)
      for (int j = 0; j < N / COLS; j++)
        for (int i = 0; i < M / MR; i++) tile(a + i * MR * K, b + j * COLS * K, c + (j * (M / MR) + i) * MR * COLS);
    flops += 20 * 2.0 * M * N * K;
    spent = now() - start;
  } while (spent < seconds);
  free(a), free(b), free(c);
  return flops / spent * 1e-9;
}

static void *one(void *arg) {
  int id = (int)(long)arg;
  cpu_set_t all, mine;
  sched_getaffinity(0, sizeof all, &all);
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &all) && seen++ == id % CPU_COUNT(&all)) {
      CPU_ZERO(&mine);
      CPU_SET(cpu, &mine);
      pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
      break;
    }
  pthread_barrier_wait(&together);
  rate[id][0] = fma_rate();
  pthread_barrier_wait(&together);
  rate[id][1] = gemm_rate();
  return NULL;
}

int main(int argc, char **argv) {
  threads = argc > 1 ? atoi(argv[1]) : 1;
  seconds = argc > 2 ? atof(argv[2]) : 0.3;
  if (threads < 1 || threads > MAX_THREADS) return fprintf(stderr, "witness: 1 to %d threads\n", MAX_THREADS), 2;
  pthread_t thread[MAX_THREADS];
  pthread_barrier_init(&together, NULL, threads);
  for (long i = 0; i < threads; i++) pthread_create(&thread[i], NULL, one, (void *)i);
  double sum[2] = {0, 0};
  for (int i = 0; i < threads; i++) {
    pthread_join(thread[i], NULL);
    sum[0] += rate[i][0], sum[1] += rate[i][1];
  }
  printf("%.1f %.1f\n", sum[0], sum[1]);
  return 0;
}
