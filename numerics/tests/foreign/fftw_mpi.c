/* Transform a three-dimensional array with FFTW over MPI: mpirun -n P fftw_mpi X Y Z IN OUT
 *
 * IN and OUT hold X * Y * Z complex doubles.
 */
#include <fftw3-mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  fftw_mpi_init();
  if (argc != 6) return fprintf(stderr, "usage: fftw_mpi X Y Z IN OUT\n"), 2;
  ptrdiff_t nx = atol(argv[1]), ny = atol(argv[2]), nz = atol(argv[3]), planes, first;
  ptrdiff_t size = fftw_mpi_local_size_3d(nx, ny, nz, MPI_COMM_WORLD, &planes, &first), count = planes * ny * nz;
  fftw_complex *x = fftw_alloc_complex(size);
  fftw_plan plan = fftw_mpi_plan_dft_3d(nx, ny, nz, x, x, MPI_COMM_WORLD, FFTW_FORWARD, FFTW_ESTIMATE);
  MPI_File file;
  MPI_Offset start = first * ny * nz * sizeof *x;
  if (MPI_File_open(MPI_COMM_WORLD, argv[4], MPI_MODE_RDONLY, MPI_INFO_NULL, &file)) return 1;
  MPI_File_read_at_all(file, start, x, 2 * count, MPI_DOUBLE, MPI_STATUS_IGNORE);
  MPI_File_close(&file);
  fftw_execute(plan);
  if (MPI_File_open(MPI_COMM_WORLD, argv[5], MPI_MODE_CREATE | MPI_MODE_WRONLY, MPI_INFO_NULL, &file)) return 1;
  MPI_File_write_at_all(file, start, x, 2 * count, MPI_DOUBLE, MPI_STATUS_IGNORE);
  MPI_File_close(&file);
  MPI_Finalize();
  return 0;
}
