//! Distributed matrices from and to NumPy's `.npy` files, block by block.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fulmen_kernels::{MatMut, MatRef, Scalar};

use super::agree::agree;
use super::header::{Header, field};
use crate::dist::{Axis, Blocks, Desc, DistMatrix, Global};
use crate::error::{Error, Result};
use crate::grid::Grid;

/// NumPy's name of `T`, as this machine stores it.
fn descr<T: Scalar>() -> String {
    let order = if cfg!(target_endian = "little") { '<' } else { '>' };
    format!("{order}{}{}", if T::IS_COMPLEX { 'c' } else { 'f' }, size_of::<T>())
}

impl<T: Scalar> DistMatrix<T> {
    /// The matrix in a file of `numpy.save`, whose elements are `T`'s (`float32`, `float64`, `complex64`,
    /// `complex128`), in C or in Fortran order. A vector is one column. Collective: every rank reads its own blocks
    /// from the file, which all hosts must see under this path. (Fortran order is read in longer pieces.)
    ///
    /// # Errors
    /// [`Error::Argument`] on all ranks when one of them cannot read the file, when they find different files, or
    /// when it holds something else: it names the file, the field and the remedy. As [`DistMatrix::zeros`].
    pub fn from_npy(grid: &Arc<Grid>, path: impl AsRef<Path>, blocks: Blocks) -> Result<Self> {
        grid.require_member()?;
        let path = path.as_ref();
        let shown = path.display().to_string();
        let opened = open::<T>(path, &shown);
        let found = opened.as_ref().map(|(_, header)| format!("{header:?}")).map_err(Error::clone);
        let found = agree(grid.all(), found)?;
        let (file, header) = opened?;
        if let Some(other) = found.iter().position(|text| *text != found[0]) {
            let problem = format!("rank {other} finds {}", found[other]);
            let remedy = "name a file that all hosts share";
            return Err(Error::argument(shown, format!("{} on rank 0", found[0]), problem, remedy));
        }
        let mut a = Self::zeros(grid, Desc::of(header.shape.0, header.shape.1, blocks))?;
        let read = read_part(&mut a, &file, &header).map_err(|e| unreadable(&shown, &e));
        agree(grid.all(), read.map(|()| String::new()))?;
        Ok(a)
    }

    /// Writes the matrix to a file that `numpy.load` reads, in Fortran order. Collective: every rank writes its own
    /// blocks to the file, which all hosts must see under this path. It takes its place when it is complete.
    ///
    /// # Errors
    /// [`Error::Argument`] on all ranks when it cannot be made there, [`Error::System`] when a rank cannot write:
    /// a file that was there before stays as it was. When a rank is lost.
    pub fn to_npy(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (all, first) = (self.grid().all(), self.grid().all().me() == 0);
        let header = Header::print(&descr::<T>(), true, (self.nrows(), self.ncols()));
        let growing =
            if first { begin(path, &header, self.file_len(header.len())) } else { Ok(String::new()) };
        let growing = PathBuf::from(&agree(all, growing)?[0]);
        let written = self.write_part(&growing, header.len() as u64).map_err(|e| unwritable(path, &e));
        let written = agree(all, written.map(|()| String::new())).map(drop);
        // One rank gives it its place, or takes it away.
        let settled = match (&written, first) {
            (Ok(()), true) => std::fs::rename(&growing, path).map_err(|e| unwritable(path, &e)),
            _ => Ok(()),
        };
        if first && (written.is_err() || settled.is_err()) {
            let _ = std::fs::remove_file(&growing); // the error that is told came first
        }
        written?;
        agree(all, settled.map(|()| String::new())).map(drop)
    }

    fn file_len(&self, header: usize) -> u64 {
        header as u64 + (self.nrows() * self.ncols() * size_of::<T>()) as u64
    }

    fn write_part(&self, growing: &Path, data: u64) -> std::io::Result<()> {
        let file = OpenOptions::new().write(true).open(growing)?;
        let (rows, cols) = runs(self);
        let local = self.local();
        for (j, lj) in cols.iter().flat_map(Run::indices) {
            let column = column(local, lj);
            for run in &rows {
                let at = data + ((j * self.nrows() + run.global) * size_of::<T>()) as u64;
                file.write_all_at(bytemuck::cast_slice(&column[run.local..][..run.len]), at)?;
            }
        }
        file.sync_all()
    }
}

/// Rows or columns of this rank that follow each other in the whole matrix too.
struct Run {
    global: usize,
    local: usize,
    len: usize,
}

impl Run {
    /// (global, local), one by one.
    fn indices(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (global, local) = (self.global, self.local);
        (0..self.len).map(move |k| (global + k, local + k))
    }
}

/// The rows and columns that this rank has.
fn runs<T: Scalar>(a: &DistMatrix<T>) -> (Vec<Run>, Vec<Run>) {
    fn of<D>(axis: Axis<D>, me: usize) -> Vec<Run> {
        if axis.nprocs == 1 {
            return vec![Run { global: 0, local: 0, len: axis.n }];
        }
        let own = axis.blocks(0..axis.n).filter(|block| axis.owner(Global::new(block.start)) == me);
        own.map(|b| Run { global: b.start, local: axis.local(Global::new(b.start)).0, len: b.len() })
            .collect()
    }
    (of(a.rows(), a.grid().myrow()), of(a.cols(), a.grid().mycol()))
}

fn column<T>(a: MatRef<'_, T>, j: usize) -> &[T] {
    a.col(j).try_as_col_major().map_or(&[], |column| column.as_slice())
}

fn column_mut<T>(a: MatMut<'_, T>, j: usize) -> &mut [T] {
    a.col_mut(j).try_as_col_major_mut().map_or(&mut [], |column| column.as_slice_mut())
}

/// Opens a file and sees that it holds what is wanted.
fn open<T: Scalar>(path: &Path, shown: &str) -> Result<(File, Header)> {
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (meta, file) = opened.map_err(|e| unreadable(shown, &e))?;
    if !meta.is_file() {
        return Err(Error::argument(shown, "it", "is no plain file", "name a file of numpy.save"));
    }
    let header = Header::read(shown, |at, bytes| file.read_exact_at(bytes, at))?;
    let wanted = descr::<T>();
    if header.descr.replace('=', &wanted[..1]) != wanted {
        let numpy = match wanted.as_str() {
            w if w.ends_with("f4") => "float32",
            w if w.ends_with("f8") => "float64",
            w if w.ends_with("c8") => "complex64",
            _ => "complex128",
        };
        let problem = format!("the program reads {wanted}");
        let remedy = format!("numpy.save(file, array.astype('{wanted}')) makes it {numpy}");
        return Err(Error::argument(field(shown, "descr"), header.descr, problem, remedy));
    }
    let (m, n) = header.shape;
    let bytes = m.checked_mul(n).and_then(|len| len.checked_mul(size_of::<T>()));
    let end = bytes.and_then(|bytes| header.data.checked_add(bytes as u64));
    if end.is_none_or(|end| meta.len() < end) {
        let problem = format!("of {wanted} do not fit into the {} bytes that the file has", meta.len());
        let remedy = "the file was cut off: copy or save it again";
        return Err(Error::argument(field(shown, "shape"), format!("{m} x {n}"), problem, remedy));
    }
    Ok((file, header))
}

fn read_part<T: Scalar>(a: &mut DistMatrix<T>, file: &File, header: &Header) -> std::io::Result<()> {
    let (m, n) = header.shape;
    let at = |element: usize| header.data + (element * size_of::<T>()) as u64;
    let (rows, cols) = runs(a);
    let mut local = a.local_mut();
    // Of a single column both orders are one.
    if header.fortran_order || n == 1 {
        for (j, lj) in cols.iter().flat_map(Run::indices) {
            let column = column_mut(local.as_mut(), lj);
            for run in &rows {
                let part = &mut column[run.local..][..run.len];
                file.read_exact_at(bytemuck::cast_slice_mut(part), at(j * m + run.global))?;
            }
        }
        return Ok(());
    }
    let mut line = vec![T::zero(); cols.iter().map(|run| run.len).max().unwrap_or(0)];
    for (i, li) in rows.iter().flat_map(Run::indices) {
        for run in &cols {
            let part = &mut line[..run.len];
            file.read_exact_at(bytemuck::cast_slice_mut(part), at(i * n + run.global))?;
            part.iter().zip(run.local..).for_each(|(&x, lj)| local[(li, lj)] = x);
        }
    }
    Ok(())
}

/// Makes the file that will take the place of `path`: head and room. Returns its path.
fn begin(path: &Path, header: &[u8], len: u64) -> Result<String> {
    let make = || {
        if path.is_dir() {
            return Err(std::io::Error::other("it is a folder"));
        }
        let name = path.file_name().ok_or_else(|| std::io::Error::other("it is no file's name"))?;
        if path.exists() {
            drop(OpenOptions::new().append(true).open(path)?); // what may not be written may not be replaced
        }
        let growing = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let mut file = File::create(&growing)?;
        let filled = file.write_all(header).and_then(|()| file.set_len(len));
        filled.inspect_err(|_| drop(std::fs::remove_file(&growing)))?;
        Ok(growing)
    };
    let remedy = "name a file in a folder that you may write to";
    let shown = path.display();
    let made =
        make().map_err(|e| Error::argument("file", shown, format!("cannot be written: {e}"), remedy))?;
    made.into_os_string()
        .into_string()
        .map_err(|path| Error::argument("file", path.display(), "is not Unicode", "choose another name"))
}

fn unreadable(shown: &str, e: &std::io::Error) -> Error {
    Error::argument("file", shown, format!("cannot be read: {e}"), "name a file that every rank may read")
}

fn unwritable(path: &Path, e: &std::io::Error) -> Error {
    Error::System { what: format!("{} cannot be written", path.display()), os: e.to_string() }
}
