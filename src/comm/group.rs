//! Groups of ranks and their small collectives.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;

use crate::error::{Error, Result};
use crate::fabric::{Buf, Fabric, Lane};

/// Slots start at multiples of this, so that every element type is aligned in them.
const SLOT_ALIGN: usize = 64;

/// Up to this many bytes from all ranks together, a reduction is one exchange; above, it is two that
/// carry less.
const DIRECT_REDUCE: usize = 64 << 10;

/// An ordered subset of the ranks of a fabric, and their collectives.
///
/// Every member calls the same collectives in the same order; nothing else keeps them apart. They run on
/// [`Lane::CONTROL`] and return when this rank's part is over: what it sent has left, what it needs has
/// come. Members are named by their index in the group, never by their rank in the fabric.
#[derive(Clone)]
pub struct Group {
    inner: Arc<Inner>,
}

struct Inner {
    fabric: Arc<dyn Fabric>,
    ranks: Vec<usize>,
    me: usize,
    /// Registered memory for the collectives, kept from call to call.
    scratch: Mutex<Option<Buf<u8>>>,
}

impl Group {
    /// The group of `ranks` in this order; this rank is one of them.
    ///
    /// # Errors
    /// [`Error::Argument`] when a rank is named twice or does not exist, or this rank is missing.
    pub fn new(fabric: Arc<dyn Fabric>, ranks: Vec<usize>) -> Result<Self> {
        let bad = |value: usize, problem: &str| {
            Err(Error::argument("group", value, problem, "name each rank of the job at most once"))
        };
        let mut seen = vec![false; fabric.size()];
        for &rank in &ranks {
            match seen.get_mut(rank) {
                None => return bad(rank, "is not a rank of the job"),
                Some(true) => return bad(rank, "is named twice"),
                Some(seen) => *seen = true,
            }
        }
        let Some(me) = ranks.iter().position(|&r| r == fabric.rank()) else {
            return bad(fabric.rank(), "makes the group, but is not in it");
        };
        Ok(Group { inner: Arc::new(Inner { fabric, ranks, me, scratch: Mutex::default() }) })
    }

    /// All ranks of a fabric in their order.
    ///
    /// # Errors
    /// None that a sound fabric gives.
    pub fn all(fabric: Arc<dyn Fabric>) -> Result<Self> {
        let ranks = (0..fabric.size()).collect();
        Group::new(fabric, ranks)
    }

    /// The fabric's ranks of the members, in order.
    pub fn ranks(&self) -> &[usize] {
        &self.inner.ranks
    }

    /// This rank's index in the group.
    pub fn me(&self) -> usize {
        self.inner.me
    }

    /// Number of members.
    #[allow(clippy::len_without_is_empty, reason = "a group has at least the rank that made it")]
    pub fn len(&self) -> usize {
        self.inner.ranks.len()
    }

    /// The fabric.
    pub fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.inner.fabric
    }

    fn net(&self) -> &dyn Fabric {
        &*self.inner.fabric
    }

    /// Runs a collective with `len` bytes of registered memory. The memory of one that failed may still be
    /// armed, and is not used again.
    fn with_scratch<R>(&self, len: usize, run: impl FnOnce(&mut Buf<u8>) -> Result<R>) -> Result<R> {
        let kept = self.scratch().take().filter(|b| b.len() >= len);
        let mut buf = match kept {
            Some(buf) => buf,
            None => Buf::zeros(self.net(), len.next_power_of_two().max(4096))?,
        };
        let result = run(&mut buf)?;
        *self.scratch() = Some(buf);
        Ok(result)
    }

    fn scratch(&self) -> MutexGuard<'_, Option<Buf<u8>>> {
        self.inner.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every member has come here.
    ///
    /// Dissemination barrier (Hensgen, Finkel and Manber 1988): ⌈log₂ n⌉ rounds.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn barrier(&self) -> Result<()> {
        let (net, ranks, me, n) = (self.net(), self.ranks(), self.me(), self.len());
        self.with_scratch(2 * SLOT_ALIGN, |buf| {
            let mut distance = 1;
            while distance < n {
                let (to, from) = (ranks[(me + distance) % n], ranks[(me + n - distance) % n]);
                buf.arm(net, Lane::CONTROL, from, 0..1)?;
                buf.put(net, Lane::CONTROL, to, SLOT_ALIGN..SLOT_ALIGN + 1)?;
                buf.wait(net, Lane::CONTROL, from)?;
                distance *= 2;
            }
            buf.flush(net)
        })
    }

    /// Every member's `mine` to every member: `all` holds them in the order of the group.
    ///
    /// # Errors
    /// When a rank is lost, or members gave different lengths.
    ///
    /// # Panics
    /// When `all` is not `len()` times as long as `mine`.
    pub fn all_gather<T: Pod>(&self, mine: &[T], all: &mut [T]) -> Result<()> {
        assert_eq!(all.len(), self.len() * mine.len(), "room for every member's part");
        let parts: Vec<Range<usize>> =
            (0..self.len()).map(|i| i * mine.len()..(i + 1) * mine.len()).collect();
        all[parts[self.me()].clone()].copy_from_slice(mine);
        self.exchange_parts(all, &parts)
    }

    /// As [`Group::all_gather`], for parts of any length.
    ///
    /// # Errors
    /// When a rank is lost.
    pub fn all_gather_var<T: Pod>(&self, mine: &[T]) -> Result<Vec<Vec<T>>> {
        let mut lens = vec![0u64; self.len()];
        self.all_gather(&[mine.len() as u64], &mut lens)?;
        let mut parts = Vec::with_capacity(self.len());
        let mut end = 0;
        for len in lens {
            parts.push(end..end + len as usize);
            end += len as usize;
        }
        let mut all = vec![T::zeroed(); end];
        all[parts[self.me()].clone()].copy_from_slice(mine);
        self.exchange_parts(&mut all, &parts)?;
        Ok(parts.into_iter().map(|p| all[p].to_vec()).collect())
    }

    /// Each member's part of `all` is right on that member; afterwards on every member.
    fn exchange_parts<T: Pod>(&self, all: &mut [T], parts: &[Range<usize>]) -> Result<()> {
        let (net, ranks, me, n) = (self.net(), self.ranks(), self.me(), self.len());
        let slots = Slots::new(parts.iter().map(|p| p.len() * size_of::<T>()));
        self.with_scratch(slots.end, |buf| {
            for step in 1..n {
                let from = (me + n - step) % n;
                if !parts[from].is_empty() {
                    buf.arm(net, Lane::CONTROL, ranks[from], slots.at(from))?;
                }
            }
            if !parts[me].is_empty() {
                buf.write(slots.at(me)).copy_from_slice(bytemuck::cast_slice(&all[parts[me].clone()]));
                for step in 1..n {
                    buf.put(net, Lane::CONTROL, ranks[(me + step) % n], slots.at(me))?;
                }
            }
            for step in 1..n {
                let from = (me + n - step) % n;
                if !parts[from].is_empty() {
                    let came = buf.wait(net, Lane::CONTROL, ranks[from])?;
                    self.expect(from, came.len(), slots.at(from).len())?;
                    let bytes = buf.read(came);
                    bytemuck::cast_slice_mut(&mut all[parts[from].clone()]).copy_from_slice(bytes);
                }
            }
            buf.flush(net)
        })
    }

    /// Every member's `mine` to `root`, which gets them in the order of the group; others get `None`.
    ///
    /// # Errors
    /// When a rank is lost, or members gave different lengths.
    pub fn gather<T: Pod>(&self, root: usize, mine: &[T]) -> Result<Option<Vec<T>>> {
        let (net, ranks, me, n) = (self.net(), self.ranks(), self.me(), self.len());
        let slots = Slots::new((0..n).map(|_| size_of_val(mine)));
        self.with_scratch(slots.end, |buf| {
            if mine.is_empty() {
                return Ok((me == root).then(Vec::new));
            }
            if me != root {
                buf.write(slots.at(0)).copy_from_slice(bytemuck::cast_slice(mine));
                buf.put(net, Lane::CONTROL, ranks[root], slots.at(0))?;
                buf.flush(net)?;
                return Ok(None);
            }
            let others = || (0..n).filter(|&i| i != me);
            for from in others() {
                buf.arm(net, Lane::CONTROL, ranks[from], slots.at(from))?;
            }
            let mut all = vec![T::zeroed(); n * mine.len()];
            all[me * mine.len()..][..mine.len()].copy_from_slice(mine);
            for from in others() {
                let came = buf.wait(net, Lane::CONTROL, ranks[from])?;
                self.expect(from, came.len(), slots.at(from).len())?;
                bytemuck::cast_slice_mut(&mut all[from * mine.len()..][..mine.len()])
                    .copy_from_slice(buf.read(came));
            }
            Ok(Some(all))
        })
    }

    /// `data` of `root` to every member, along a binomial tree.
    ///
    /// # Errors
    /// When a rank is lost, or members gave different lengths.
    pub fn bcast<T: Pod>(&self, root: usize, data: &mut [T]) -> Result<()> {
        let (net, ranks, me, n) = (self.net(), self.ranks(), self.me(), self.len());
        let bytes = size_of_val(data);
        if bytes == 0 || n == 1 {
            return Ok(());
        }
        self.with_scratch(bytes, |buf| {
            let relative = (me + n - root) % n;
            let rank = |relative: usize| ranks[(relative + root) % n];
            if let Some(parent) = tree_parent(relative) {
                buf.arm(net, Lane::CONTROL, rank(parent), 0..bytes)?;
                let came = buf.wait(net, Lane::CONTROL, rank(parent))?;
                self.expect((parent + root) % n, came.len(), bytes)?;
                bytemuck::cast_slice_mut(data).copy_from_slice(buf.read(came));
            } else {
                buf.write(0..bytes).copy_from_slice(bytemuck::cast_slice(data));
            }
            for child in tree_children(relative, n) {
                buf.put(net, Lane::CONTROL, rank(child), 0..bytes)?;
            }
            buf.flush(net)
        })
    }

    /// Folds every member's `data` element by element, in the order of the group, into `data` of all.
    ///
    /// The order of operations does not depend on anything but the group, and every member gets the
    /// same bits: ((x₀ ∘ x₁) ∘ x₂) ∘ …
    ///
    /// # Errors
    /// When a rank is lost, or members gave different lengths.
    pub fn all_reduce<T: Pod>(&self, data: &mut [T], fold: impl Fn(T, T) -> T) -> Result<()> {
        let (n, len) = (self.len(), data.len());
        if n == 1 || len == 0 {
            return Ok(());
        }
        if n * size_of_val(data) <= DIRECT_REDUCE {
            let mut all = vec![T::zeroed(); n * len];
            self.all_gather(data, &mut all)?;
            fold_parts(data, &all, &fold);
            return Ok(());
        }
        // Each member folds its share of the elements and tells the others.
        let shares: Vec<Range<usize>> = (0..n).map(|i| len * i / n..len * (i + 1) / n).collect();
        let mine = &shares[self.me()];
        let all = self.transpose(data, &shares)?;
        fold_parts(&mut data[mine.clone()], &all, &fold);
        self.exchange_parts(data, &shares)
    }

    /// Sends share i of `data` to member i; returns this member's share of every member's `data`.
    fn transpose<T: Pod>(&self, data: &[T], shares: &[Range<usize>]) -> Result<Vec<T>> {
        let (net, ranks, me, n) = (self.net(), self.ranks(), self.me(), self.len());
        let bytes = |r: &Range<usize>| r.len() * size_of::<T>();
        let out = Slots::new(shares.iter().map(bytes));
        let mine = shares[me].clone();
        let inward = Slots::new((0..n).map(|_| bytes(&mine)));
        let shift = |r: Range<usize>| r.start + out.end..r.end + out.end;
        let mut all = vec![T::zeroed(); n * mine.len()];
        all[me * mine.len()..][..mine.len()].copy_from_slice(&data[mine.clone()]);
        self.with_scratch(out.end + inward.end, |buf| {
            if !mine.is_empty() {
                for step in 1..n {
                    let from = (me + n - step) % n;
                    buf.arm(net, Lane::CONTROL, ranks[from], shift(inward.at(from)))?;
                }
            }
            for step in 1..n {
                let to = (me + step) % n;
                if !shares[to].is_empty() {
                    buf.write(out.at(to)).copy_from_slice(bytemuck::cast_slice(&data[shares[to].clone()]));
                    buf.put(net, Lane::CONTROL, ranks[to], out.at(to))?;
                }
            }
            if !mine.is_empty() {
                for step in 1..n {
                    let from = (me + n - step) % n;
                    let came = buf.wait(net, Lane::CONTROL, ranks[from])?;
                    self.expect(from, came.len(), inward.at(from).len())?;
                    bytemuck::cast_slice_mut(&mut all[from * mine.len()..][..mine.len()])
                        .copy_from_slice(buf.read(came));
                }
            }
            buf.flush(net)?;
            Ok(all)
        })
    }

    /// Element-wise sum over the members, in their order.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_sum<T: Pod + std::ops::Add<Output = T>>(&self, data: &mut [T]) -> Result<()> {
        self.all_reduce(data, |a, b| a + b)
    }

    /// Element-wise maximum over the members. What cannot be compared (a NaN) wins, so that it is met.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_max<T: Pod + PartialOrd>(&self, data: &mut [T]) -> Result<()> {
        self.all_reduce(data, larger)
    }

    fn expect(&self, from: usize, came: usize, expected: usize) -> Result<()> {
        if came == expected {
            return Ok(());
        }
        let rank = self.ranks()[from];
        Err(Error::Internal(format!(
            "rank {rank} ({}) sent {came} bytes to rank {} in a collective of {expected}: \
             ranks called different collectives",
            self.net().host(rank),
            self.net().rank(),
        )))
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "member {} of {:?}", self.me(), self.ranks())
    }
}

/// The larger of two; if they cannot be compared, the one that cannot be compared with itself.
pub(crate) fn larger<T: PartialOrd + Copy>(a: T, b: T) -> T {
    match a.partial_cmp(&b) {
        Some(std::cmp::Ordering::Less) => b,
        Some(_) => a,
        None if a.partial_cmp(&a).is_none() => a,
        None => b,
    }
}

fn fold_parts<T: Pod>(data: &mut [T], all: &[T], fold: impl Fn(T, T) -> T) {
    let len = data.len();
    for (i, x) in data.iter_mut().enumerate() {
        *x = all[i..].iter().step_by(len).copied().reduce(&fold).unwrap_or(*x);
    }
}

/// Byte ranges, one after the other, each aligned.
struct Slots {
    ranges: Vec<Range<usize>>,
    end: usize,
}

impl Slots {
    fn new(lens: impl Iterator<Item = usize>) -> Self {
        let mut end = 0;
        let ranges = lens
            .map(|len| {
                let start = end;
                end = (start + len).next_multiple_of(SLOT_ALIGN);
                start..start + len
            })
            .collect();
        Slots { ranges, end }
    }

    fn at(&self, i: usize) -> Range<usize> {
        self.ranges[i].clone()
    }
}

/// Parent of member `i` in the binomial tree with root 0: `i` without its lowest bit.
pub(crate) fn tree_parent(i: usize) -> Option<usize> {
    (i != 0).then(|| i & (i - 1))
}

/// Children of member `i` of `n` in the same tree, the largest subtree first.
pub(crate) fn tree_children(i: usize, n: usize) -> impl Iterator<Item = usize> {
    let low = if i == 0 { n.next_power_of_two() } else { i & i.wrapping_neg() };
    std::iter::successors(Some(low / 2), |bit| Some(bit / 2))
        .take_while(|&bit| bit > 0)
        .map(move |bit| i + bit)
        .filter(move |&child| child < n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_reaches_everyone_once() {
        for n in 1..40 {
            let mut parents = vec![None; n];
            for i in 0..n {
                for child in tree_children(i, n) {
                    assert!(parents[child].replace(i).is_none(), "{child} of {n} has two parents");
                }
            }
            for (i, parent) in parents.into_iter().enumerate() {
                assert_eq!(parent, tree_parent(i), "member {i} of {n}");
                assert!(parent.is_none_or(|p| p < i));
            }
        }
    }

    #[test]
    fn a_nan_is_the_largest() {
        assert_eq!(larger(1.0, 2.0), 2.0);
        assert_eq!(larger(3, 2), 3);
        assert!(larger(f64::NAN, 2.0).is_nan() && larger(2.0, f64::NAN).is_nan());
    }

    #[test]
    fn slots_do_not_overlap_and_are_aligned() {
        let slots = Slots::new([0, 1, 64, 65, 0, 3].into_iter());
        let mut end = 0;
        for (i, len) in [0, 1, 64, 65, 0, 3].into_iter().enumerate() {
            let slot = slots.at(i);
            assert!(slot.start >= end && slot.start.is_multiple_of(SLOT_ALIGN) && slot.len() == len);
            end = slot.end;
        }
        assert!(slots.end >= end);
    }
}
