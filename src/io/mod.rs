//! Matrices in files that other programs read and write.
//!
//! | format | reads | writes |
//! |---|---|---|
//! | NumPy's `.npy` | [`DistMatrix::from_npy`](crate::DistMatrix::from_npy) | [`DistMatrix::to_npy`](crate::DistMatrix::to_npy) |
//!
//! Every rank reads and writes its own blocks of the file, so the file has to be one that all hosts see, and no rank
//! ever holds more than its part.

mod agree;
mod header;
mod npy;
