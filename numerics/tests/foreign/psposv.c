/* Solve a symmetric positive definite system with ScaLAPACK:
 *
 *     mpirun -n P psposv N BLOCK RUNS IN OUT
 *
 * IN holds N * N floats and N more, the right-hand side; OUT gets the N floats of the solution. Prints for each run the
 * CPU milliseconds of all ranks in psposv, and milliseconds of time.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

extern void Cblacs_get(int, int, int *), Cblacs_gridinit(int *, char *, int, int);
extern void Cblacs_gridinfo(int, int *, int *, int *, int *);
extern int numroc_(int *, int *, int *, int *, int *);
extern void descinit_(int *, int *, int *, int *, int *, int *, int *, int *, int *, int *);
extern void psposv_(char *, int *, int *, float *, int *, int *, int *, float *, int *, int *, int *, int *);

static double cpu_ms(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return 1e3 * (u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-3 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (argc != 6) return fprintf(stderr, "usage: psposv N BLOCK RUNS IN OUT\n"), 2;
  int n = atoi(argv[1]), block = atoi(argv[2]), runs = atoi(argv[3]), ranks, rank;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int rows = 1, zero = 0, one = 1, info, context, row, column;
  for (int i = 1; i * i <= ranks; i++)
    if (ranks % i == 0) rows = i;
  int columns = ranks / rows;
  Cblacs_get(-1, 0, &context);
  Cblacs_gridinit(&context, "Row", rows, columns);
  Cblacs_gridinfo(context, &rows, &columns, &row, &column);
  int m = numroc_(&n, &block, &row, &zero, &rows), k = numroc_(&n, &block, &column, &zero, &columns);
  int lead = m > 1 ? m : 1, desc_a[9], desc_b[9];
  descinit_(desc_a, &n, &n, &block, &block, &zero, &zero, &context, &lead, &info);
  descinit_(desc_b, &n, &one, &block, &block, &zero, &zero, &context, &lead, &info);
  size_t order = n;
  float *all = malloc((order * order + order) * sizeof *all);
  FILE *in = fopen(argv[4], "rb");
  if (!in || fread(all, sizeof *all, order * order + order, in) != order * order + order)
    return fprintf(stderr, "psposv: %s is too short\n", argv[4]), 1;
  fclose(in);
  float *a = malloc(((size_t)m * k + 1) * sizeof *a), *b = calloc(m + 1, sizeof *b), *x = calloc(n, sizeof *x);
  for (int run = 0; run < runs; run++) {
    for (int j = 0; j < k; j++)
      for (int i = 0; i < m; i++) {
        size_t gi = (i / block * rows + row) * block + i % block, gj = (j / block * columns + column) * block + j % block;
        a[(size_t)j * m + i] = all[gj * order + gi];
        if (column == 0) b[i] = all[order * order + gi];
      }
    MPI_Barrier(MPI_COMM_WORLD);
    double start = cpu_ms(), begin = MPI_Wtime(), mine, total;
    psposv_("L", &n, &one, a, &one, &one, desc_a, b, &one, &one, desc_b, &info);
    MPI_Barrier(MPI_COMM_WORLD);
    double took = 1e3 * (MPI_Wtime() - begin);
    mine = cpu_ms() - start;
    MPI_Reduce(&mine, &total, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (info) return fprintf(stderr, "psposv: info %d\n", info), 1;
    if (rank == 0) printf("%.1f %.1f\n", total, took);
  }
  if (column == 0)
    for (int i = 0; i < m; i++) x[(i / block * rows + row) * block + i % block] = b[i];
  float *sum = malloc(order * sizeof *sum);
  MPI_Reduce(x, sum, n, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    FILE *out = fopen(argv[5], "wb");
    if (!out || fwrite(sum, sizeof *sum, order, out) != order || fclose(out)) return 1;
  }
  MPI_Finalize();
  return 0;
}
