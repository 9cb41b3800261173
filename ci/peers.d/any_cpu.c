/* Preloaded into programs that use MKL: it then chooses kernels by instruction set and not by the maker of the CPU.
 * On an AMD Zen 4 that is worth 8 % of dgemm, so a fair comparison needs it. MKL asks through one of two names. */
static int yes(void) { return 1; }
int mkl_serv_intel_cpu_true(void) { return 1; }                /* until 2025 */
int (*mkl_serv_get_cpu_true(void))(void) { return yes; }       /* 2026: hands out the function */
