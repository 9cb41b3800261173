//! `.npy` files over grids, block sizes, source ranks, types and both orders; and what is wrong with one, said by all ranks.

use std::io::Write;
use std::path::Path;

use fulmen::kernels::{Element, Real, Scalar};
use fulmen::prelude::*;
use proptest::prelude::*;

fn entry<T: Scalar>(i: usize, j: usize) -> T {
    let real = |x: usize| <T as Scalar>::Real::from_f64(x as f64);
    T::from_parts(real(1000 * i + j), real(7 * i + 1))
}

/// What `numpy.save` writes for an array of this shape, independently of the library.
fn save<T: Scalar>(path: &Path, descr: &str, shape: &str, fortran: bool, (m, n): (usize, usize)) {
    let order = if fortran { "True" } else { "False" };
    let mut head = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    while (10 + head.len() + 1) % 64 != 0 {
        head.push(' ');
    }
    head.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((head.len() as u16).to_le_bytes());
    bytes.extend(head.as_bytes());
    let mut push = |i, j| bytes.extend(bytemuck::bytes_of(&entry::<T>(i, j)));
    if fortran {
        (0..n).for_each(|j| (0..m).for_each(|i| push(i, j)));
    } else {
        (0..m).for_each(|i| (0..n).for_each(|j| push(i, j)));
    }
    std::fs::write(path, bytes).unwrap();
}

fn on<R: Send>(
    (p, q): (usize, usize),
    program: impl Fn(&World, &std::sync::Arc<Grid>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let setup = Setup { threads: 1, ..Setup::default() };
    World::threads(p * q, &setup, |world| program(&world, &world.grid(p, q)?)).unwrap()
}

/// Reads what NumPy would have written, writes it again, and compares the file with NumPy's.
fn round_trip<T: Element>(
    descr: &str,
    (m, n): (usize, usize),
    grid: (usize, usize),
    blocks: Blocks,
    fortran: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let (given, written) = (folder.path().join("given.npy"), folder.path().join("written.npy"));
    save::<T>(&given, descr, &format!("({m}, {n})"), fortran, (m, n));
    let results = on(grid, |_, grid| {
        let a = DistMatrix::<T>::from_npy(grid, &given, blocks)?;
        assert_eq!((a.nrows(), a.ncols()), (m, n));
        for k in 0..m * n {
            let (i, j) = (k % m, k / m);
            assert!(a.get(i, j).is_none_or(|x| x == entry::<T>(i, j)), "({i}, {j})");
        }
        a.to_npy(&written)
    });
    results.into_iter().for_each(|r| r.unwrap());
    save::<T>(&given, descr, &format!("({m}, {n})"), true, (m, n));
    assert_eq!(std::fs::read(&given).unwrap(), std::fs::read(&written).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "something was left behind");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn read_and_written_again(
        shape in (0usize..30, 0usize..30), grid in (1usize..4, 1usize..4), mb in 1usize..9, nb in 1usize..9,
        src in (0usize..3, 0usize..3), fortran: bool, kind in 0..4,
    ) {
        let blocks = Blocks { mb, nb, rsrc: src.0 % grid.0, csrc: src.1 % grid.1 };
        match kind {
            0 => round_trip::<f32>("<f4", shape, grid, blocks, fortran),
            1 => round_trip::<f64>("<f8", shape, grid, blocks, fortran),
            2 => round_trip::<c32>("<c8", shape, grid, blocks, fortran),
            _ => round_trip::<c64>("<c16", shape, grid, blocks, fortran),
        }
    }
}

/// A vector is a column; a block may be larger than the matrix.
#[test]
fn a_vector_is_one_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b.npy");
    save::<f64>(&path, "<f8", "(11,)", false, (11, 1));
    for grid in [(1, 1), (2, 3)] {
        for result in
            on(grid, |_, grid| DistMatrix::<f64>::from_npy(grid, &path, Blocks::square(64))?.gather(0))
        {
            let Some(b) = result.unwrap() else { continue };
            assert_eq!((b.nrows(), b.ncols()), (11, 1));
            assert!((0..11).all(|i| b[(i, 0)] == entry::<f64>(i, 0)));
        }
    }
}

/// All ranks end with the same words, which name file, field and remedy, and exit with 2.
#[test]
fn what_is_wrong_is_said_by_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.npy");
    let told = |path: &Path| {
        let read = |grid: &_| DistMatrix::<f64>::from_npy(grid, path, Blocks::square(4)).map(drop);
        // Not the ranks' results: the first to end with an error would end the others.
        let texts = on((2, 2), |_, grid| Ok(read(grid).map_err(|e| (e.exit_code(), e.to_string()))));
        let texts: Vec<_> = texts.into_iter().map(|r| r.unwrap().unwrap_err()).collect();
        assert!(texts.windows(2).all(|w| w[0] == w[1]) && texts[0].0 == 2, "{texts:?}");
        texts[0].1.clone()
    };
    assert!(told(&path).contains("a.npy: cannot be read: No such file"), "{}", told(&path));
    assert!(told(folder.path()).contains("is no plain file"), "{}", told(folder.path()));
    std::fs::write(&path, "1 2\n3 4\n").unwrap();
    assert!(told(&path).contains("is no .npy file"), "{}", told(&path));
    save::<f32>(&path, "<f4", "(3, 3)", true, (3, 3));
    let text = told(&path);
    assert!(text.contains("a.npy: descr: <f4: the program reads <f8"), "{text}");
    assert!(text.contains("numpy.save(file, array.astype('<f8'))"), "{text}");
    save::<f64>(&path, ">f8", "(3, 3)", true, (3, 3));
    assert!(told(&path).contains("a.npy: descr: >f8"), "{}", told(&path));
    save::<f64>(&path, "<f8", "(3, 4)", true, (3, 3));
    assert!(
        told(&path).contains("a.npy: shape: 3 x 4: of <f8 do not fit into the 200 bytes"),
        "{}",
        told(&path)
    );
    save::<f64>(&path, "<f8", "(9223372036854775807, 9223372036854775807)", true, (1, 1));
    assert!(told(&path).contains("do not fit"), "{}", told(&path));
    save::<f64>(&path, "<f8", "(2, 2, 2)", true, (8, 1));
    assert!(told(&path).contains("array.reshape(rows, columns)"), "{}", told(&path));
}

/// A file that cannot be made is found before anything is written; the old one stays.
#[test]
fn where_nothing_can_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &Path| -> Vec<Result<()>> {
        let results = on((1, 2), |_, grid| {
            let a = DistMatrix::<f64>::from_fn(grid, Desc::square_blocks(5, 5, 2), entry)?;
            Ok(a.to_npy(path))
        });
        results.into_iter().map(|r| r.unwrap()).collect()
    };
    for result in write(&folder.path().join("none/x.npy")) {
        let e = result.unwrap_err();
        assert!(e.to_string().contains("none/x.npy: cannot be written: "), "{e}");
        assert_eq!(e.exit_code(), 2);
    }
    for result in write(folder.path()) {
        assert!(result.unwrap_err().to_string().contains("it is a folder"));
    }
    let mut old = std::fs::File::create(folder.path().join("x.npy")).unwrap();
    old.write_all(b"an old file, longer than nothing").unwrap();
    write(&folder.path().join("x.npy")).into_iter().for_each(|r| r.unwrap());
    assert!(std::fs::read(folder.path().join("x.npy")).unwrap().starts_with(b"\x93NUMPY"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// NumPy itself, where it is installed.
#[test]
fn numpy_reads_and_writes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let python = |script: &str| {
        std::process::Command::new("python3").args(["-c", script]).current_dir(folder.path()).output()
    };
    if !python("import numpy").is_ok_and(|o| o.status.success()) {
        println!("skipped: python3 with numpy is not installed");
        return;
    }
    let script = "import numpy as np\na = np.arange(35).reshape(5, 7) * (1 + 0.5j)\nnp.save('c.npy', a)\n\
                  np.save('f.npy', np.asfortranarray(a))";
    assert!(python(script).unwrap().status.success());
    for (name, copy) in [("c.npy", "c2.npy"), ("f.npy", "f2.npy")] {
        let results = on((2, 2), |_, grid| {
            let a = DistMatrix::<c64>::from_npy(grid, folder.path().join(name), Blocks::square(2))?;
            assert!(a.get(3, 4).is_none_or(|x| x == c64::new(25.0, 12.5)));
            a.to_npy(folder.path().join(copy))
        });
        results.into_iter().for_each(|r| r.unwrap());
        let script = format!("import numpy as np\nassert (np.load('{name}') == np.load('{copy}')).all()");
        let output = python(&script).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
