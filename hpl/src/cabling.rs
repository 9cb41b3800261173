//! What a grid costs where hosts are joined by cables and no switch, which one costs least, and words for it. Pure.

use fulmen::comm::{Cables, Topology};

use crate::auto::Choice;
use crate::params::{Bcast, Input, Pmap};
use crate::settings::Given;

/// How ranks are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Process rows.
    pub p: usize,
    /// Process columns.
    pub q: usize,
    /// Rank order.
    pub pmap: Pmap,
}

/// Traffic of a whole solve. One unit is the matrix's bytes over one cable.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cost {
    /// Panels along the rows.
    pub panels: f64,
    /// Rows of U, and those that make room for them, along the columns.
    pub rows: f64,
    /// Cables between the two ranks of a column that are farthest from each other: the pivot search waits for
    /// them once a column of the matrix.
    pub farthest: usize,
}

impl Cost {
    /// How many cables each byte of the matrix crosses, all in all.
    pub fn crossings(&self) -> f64 {
        self.panels + self.rows
    }
}

impl Layout {
    fn rank(self, row: usize, col: usize) -> usize {
        match self.pmap {
            Pmap::Row => row * self.q + col,
            Pmap::Column => row + col * self.p,
        }
    }

    fn name(self) -> String {
        let order = if self.p == 1 || self.q == 1 {
            ""
        } else if self.pmap == Pmap::Row {
            ", row-major"
        } else {
            ", column-major"
        };
        format!("{}x{}{order}", self.p, self.q)
    }
}

/// What a layout costs on these cables, with panels sent in this shape.
///
/// L and U are half of the matrix each. A panel goes to all others of its process row, from each column of the
/// grid equally often; a row of U goes to all others of its process column, and a row that gives place to it goes
/// from anywhere to anywhere in there.
pub fn cost(cables: &Cables, layout: Layout, shape: Topology) -> Cost {
    let Layout { p, q, .. } = layout;
    let (mut panels, mut rows, mut farthest) = (0.0, 0.0, 0);
    for row in 0..p {
        let own = Cables::new(q, |a, b| cables.between(layout.rank(row, a), layout.rank(row, b)));
        panels += (0..q).map(|root| own.crossings(shape, root)).sum::<f64>() / (2 * p * q) as f64;
    }
    for col in 0..q {
        let pairs = (0..p * p).map(|i| (i / p, i % p)).filter(|(a, b)| a != b);
        let hops = pairs.map(|(a, b)| cables.between(layout.rank(a, col), layout.rank(b, col)));
        let (sum, most) = hops.fold((0, 0), |(sum, most), hops| (sum + hops, most.max(hops)));
        rows += sum as f64 * (1.0 / p as f64 + 1.0 / (p * p) as f64) / (2 * q) as f64;
        farthest = farthest.max(most);
    }
    Cost { panels, rows, farthest }
}

/// The layout of `ranks` whose bytes cross the fewest cables; of equal ones, the nearest to a square.
pub fn cheapest(cables: &Cables, ranks: usize, shape: Topology) -> (Layout, Cost) {
    let mut best: Option<(Layout, Cost)> = None;
    // The squarest first.
    for p in (1..=ranks).rev().filter(|p| p * p <= ranks && ranks.is_multiple_of(*p)) {
        for pmap in [Pmap::Row, Pmap::Column] {
            let layout = Layout { p, q: ranks / p, pmap };
            let cost = cost(cables, layout, shape);
            if best.is_none_or(|(_, least)| cost.crossings() < least.crossings() - 1e-9) {
                best = Some((layout, cost));
            }
        }
    }
    best.unwrap_or((Layout { p: 1, q: 1, pmap: Pmap::Row }, Cost { panels: 0.0, rows: 0.0, farthest: 0 }))
}

/// Where some ranks reach each other only through others: sets what was left open of the grid, the rank order
/// and the broadcast, and names what was given and costs more than it need. Elsewhere it does nothing.
pub fn settle(
    input: &mut Input,
    given: Given,
    cables: &Cables,
    choices: &mut Vec<Choice>,
    notes: &mut Vec<String>,
) {
    if cables.is_direct() {
        return;
    }
    if !given.bcast {
        input.bcasts = vec![Bcast::Cables];
        let why = "some ranks reach each other only through others: panels go along the cables".to_string();
        choices.push(Choice { what: "BCAST", value: Bcast::Cables.to_string(), why });
    }
    let shape = |input: &Input| input.bcasts.first().map_or(Topology::Cables, |bcast| (*bcast).into());
    let ranks = if given.grid { input.ranks_needed() } else { cables.len() };
    let (best, least) = cheapest(cables, ranks, shape(input));
    if !given.grid {
        input.grids = vec![(best.p, best.q)];
        input.pmap = if given.pmap { input.pmap } else { best.pmap };
        let why = format!(
            "each byte of the matrix crosses {:.2} cables, the fewest of all grids",
            least.crossings()
        );
        choices.retain(|choice| choice.what != "grid");
        choices.push(Choice { what: "grid", value: best.name(), why });
    }
    for &(p, q) in &input.grids {
        let layout = Layout { p, q, pmap: input.pmap };
        let own = cost(cables, layout, shape(input));
        let (best, least) = cheapest(cables, p * q, shape(input));
        if own.crossings() > 1.05 * least.crossings() {
            notes.push(format!(
                "grid {}: each byte of the matrix crosses {:.2} cables (panels {:.2}, rows {:.2}), and the pivot \
                 search {} a column; {} would cross {:.2}",
                layout.name(),
                own.crossings(),
                own.panels,
                own.rows,
                own.farthest,
                best.name(),
                least.crossings()
            ));
        }
        for &bcast in input.bcasts.iter().filter(|bcast| **bcast != Bcast::Cables) {
            let (named, along) =
                (cost(cables, layout, bcast.into()).panels, cost(cables, layout, Topology::Cables).panels);
            if named > 1.05 * along {
                notes.push(format!(
                    "BCAST {bcast} on the {p}x{q} grid: panels cross {:.1} times as many cables as along them (leave \
                     BCAST away for that)",
                    named / along
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(p: usize, q: usize, pmap: Pmap) -> Layout {
        Layout { p, q, pmap }
    }

    #[test]
    fn costs_by_hand() {
        // One panel to three others along the chain, half of the matrix; no rows.
        let cables = Cables::chain(4);
        let one = cost(&cables, layout(1, 4, Pmap::Row), Topology::Cables);
        assert_eq!(one, Cost { panels: 1.5, rows: 0.0, farthest: 0 });
        // From the middle the ring crosses five cables, from the ends three and five.
        let named = cost(&cables, layout(1, 4, Pmap::Row), Topology::Ring);
        assert_eq!(named.panels, (3.0 + 5.0 + 5.0 + 5.0) / 8.0);
        // Rows of neighbours, columns two apart: U to the other, 2 cables, and half of the rows that give place.
        let square = cost(&cables, layout(2, 2, Pmap::Row), Topology::Cables);
        assert_eq!(square, Cost { panels: 0.5, rows: 2.0 * 0.5 * 1.5, farthest: 2 });
        let columns = cost(&cables, layout(2, 2, Pmap::Column), Topology::Cables);
        assert_eq!(columns, Cost { panels: 1.0, rows: 0.75, farthest: 1 });
        // Where all are joined it is the textbook's: (q - 1) / 2 and (p - 1) / 2 · (1 + 1 / p).
        let direct = Cables::new(6, |_, _| 1);
        let plain = cost(&direct, layout(2, 3, Pmap::Row), Topology::Ring);
        assert!((plain.panels - 1.0).abs() < 1e-12 && (plain.rows - 0.75).abs() < 1e-12, "{plain:?}");
    }

    #[test]
    fn the_cheapest_grid_is_found_and_taken() {
        assert_eq!(cheapest(&Cables::chain(4), 4, Topology::Cables).0, layout(1, 4, Pmap::Row));
        assert_eq!(cheapest(&Cables::ring(4), 4, Topology::Cables).0.p, 1);
        // Joined directly, the square is as good as the flat grid is not.
        assert_eq!(cheapest(&Cables::new(4, |_, _| 1), 4, Topology::Cables).0, layout(2, 2, Pmap::Row));

        let settled = |given: Given, input: Input, cables: &Cables| {
            let (mut input, mut choices, mut notes) = (input, Vec::new(), Vec::new());
            settle(&mut input, given, cables, &mut choices, &mut notes);
            (input, choices, notes)
        };
        let (input, choices, notes) = settled(Given::default(), Input::default(), &Cables::chain(4));
        assert_eq!((input.grids, input.bcasts), (vec![(1, 4)], vec![Bcast::Cables]));
        assert!(choices.iter().any(|c| c.what == "grid" && c.why.contains("1.50 cables")), "{choices:?}");
        assert!(notes.is_empty(), "{notes:?}");

        // What is given stays, and is named with its cost.
        let given = Given { grid: true, bcast: true, ..Given::default() };
        let bad = Input { grids: vec![(4, 1), (1, 4)], bcasts: vec![Bcast::Ring1], ..Input::default() };
        let (input, choices, notes) = settled(given, bad.clone(), &Cables::chain(4));
        assert_eq!((input, choices.len()), (bad.clone(), 0));
        assert!(notes[0].starts_with("grid 4x1: each byte of the matrix crosses 3.12 cables"), "{notes:?}");
        assert!(
            notes.iter().any(|n| n.starts_with("BCAST 1ring on the 1x4 grid: panels cross 1.5 times")),
            "{notes:?}"
        );

        // Nothing to say where all are joined.
        let (input, choices, notes) = settled(Given::default(), Input::default(), &Cables::new(4, |_, _| 1));
        assert_eq!((input, choices.len(), notes.len()), (Input::default(), 0, 0));
    }
}
