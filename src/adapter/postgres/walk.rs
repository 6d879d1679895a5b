//! Ranges of blocks: the parts of a table that one statement reads.
//!
//! A statement names a range by two row ids: `ctid >= '(0,0)' AND ctid < '(512,0)'`. Postgres 14 and later
//! read these blocks only. A statement over a partitioned table reads the range in every partition. So a
//! walk needs no names of partitions, and no rights on them.

use std::ops::Range;

use rand::RngExt;

use super::super::inspection::Stats;

/// How many blocks a step of a purge reads, in all partitions: 4 MiB, about 20,000 rows.
const STEP_BLOCKS: u64 = 512;
/// How many blocks a call of `list` reads: 16 MiB.
const LIST_BLOCKS: u64 = 2_048;
/// How many blocks `stats` reads: 16 MiB, about 80,000 rows.
const STATS_BLOCKS: u64 = 2_048;
/// How many ranges a sample has.
const SAMPLE_RANGES: u64 = 32;
/// The number after the last block that a table can have.
const END: u64 = u32::MAX as u64;

/// The part of the table that a statement reads, as row ids.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) from: String,
    pub(super) until: String,
}

impl From<&Range<u64>> for Blocks {
    fn from(blocks: &Range<u64>) -> Self {
        Self { from: row_id(blocks.start, 0), until: row_id(blocks.end, 0) }
    }
}

/// Returns a row id as Postgres reads it.
pub(super) fn row_id(block: u64, item: u16) -> String {
    format!("({block},{item})")
}

/// The size of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TableSize {
    /// The number of blocks of each partition; one number for a table without partitions.
    pub(super) blocks: Vec<u64>,
    pub(super) bytes: u64,
}

impl TableSize {
    /// Returns the number of blocks of the largest partition.
    pub(super) fn length(&self) -> u32 {
        // A block number of Postgres has 32 bits.
        u32::try_from(self.blocks.iter().copied().max().unwrap_or(0)).unwrap_or(u32::MAX)
    }

    /// Returns how long a range is that reads so many blocks in all partitions.
    fn range_length(&self, blocks: u64) -> u64 {
        (blocks / (self.blocks.len() as u64).max(1)).max(1)
    }

    /// Returns the blocks of one call of `list` that begins at this block, in a list that ends before `end`.
    pub(super) fn list_range(&self, from: u32, end: u32) -> Range<u64> {
        let from = u64::from(from);
        from..(from + self.range_length(LIST_BLOCKS)).min(end.into()).max(from)
    }

    /// Returns the ranges that `stats` reads: the whole table, or ranges that are spread evenly over a
    /// table with more blocks than [`STATS_BLOCKS`].
    pub(super) fn sample(&self) -> Sample {
        let total: u64 = self.blocks.iter().sum();
        if total <= STATS_BLOCKS {
            // Blocks that were added since are read too.
            return Sample { ranges: std::iter::once(0..END).collect(), read: total, total };
        }
        let ranges = SAMPLE_RANGES.min(self.range_length(STATS_BLOCKS));
        let (length, each) = (u64::from(self.length()), self.range_length(STATS_BLOCKS / ranges));
        let range = |number: u64| {
            let (from, until) = (length * number / ranges, length * (number + 1) / ranges);
            let from = rand::rng().random_range(from..=until.saturating_sub(each).max(from));
            from..from + each
        };
        let ranges: Vec<_> = (0..ranges).map(range).collect();
        let read = ranges.iter().map(|range| self.blocks_in(range)).sum();
        Sample { ranges, read, total }
    }

    fn blocks_in(&self, range: &Range<u64>) -> u64 {
        self.blocks.iter().map(|blocks| range.end.min(*blocks).saturating_sub(range.start)).sum()
    }
}

/// The part of a table that `stats` reads.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) ranges: Vec<Range<u64>>,
    /// The number of blocks in these ranges, and in the table.
    read: u64,
    total: u64,
}

impl Sample {
    /// Returns the statistics of the table from those of the ranges.
    pub(super) fn scale(&self, read: &Stats) -> Stats {
        if self.read >= self.total {
            return Stats { is_exact: true, ..read.clone() };
        }
        let scale = |rows: u64| {
            let rows = u128::from(rows) * u128::from(self.total) / u128::from(self.read.max(1));
            u64::try_from(rows).unwrap_or(u64::MAX)
        };
        Stats { is_exact: false, ..read.clone().map_counts(scale) }
    }
}

/// Where the round of a purge stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The block at which the round began.
    start: u64,
    /// How many blocks the round has read in the largest partition.
    done: u64,
    /// How many blocks that partition had when the round began. Rows in later blocks are too new to be
    /// purged.
    length: u64,
    /// How many blocks a step reads in each partition.
    step: u64,
    /// The size of the table when the round began.
    bytes: u64,
}

impl Place {
    /// Begins a round: at the first block of a random step.
    pub(super) fn begin(size: &TableSize) -> Self {
        let (length, step) = (u64::from(size.length()), size.range_length(STEP_BLOCKS));
        // A multiple of `step`: the first step reads each block with the same probability.
        let start = rand::rng().random_range(0..length.div_ceil(step).max(1)) * step;
        Self { start, done: 0, length, step, bytes: size.bytes }
    }

    /// Returns the bytes of the table with its indexes when the round began.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the blocks of the next step.
    pub(super) fn range(&self) -> Range<u64> {
        if self.length <= self.step {
            return 0..END;
        }
        let from = (self.start + self.done) % self.length;
        from..from + self.step.min(self.length - from).min(self.length - self.done)
    }

    /// Returns the place after the next step; `None` after the last step.
    pub(super) fn next(&self) -> Option<Self> {
        let range = self.range();
        let done = self.done + (range.end - range.start);
        (done < self.length).then_some(Self { done, ..*self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(blocks: &[u64]) -> TableSize {
        TableSize { blocks: blocks.to_vec(), bytes: 0 }
    }

    #[test]
    fn a_round_reads_every_block_once() {
        for blocks in [&[][..], &[0], &[1], &[512], &[513], &[5_000], &[64, 65, 900], &[3; 1_000]] {
            let size = size(blocks);
            let (mut place, mut read) = (Some(Place::begin(&size)), vec![0; 5_001]);
            let mut steps = 0;
            while let Some(at) = place {
                let range = at.range();
                assert!(range.start < range.end);
                let length = range.end - range.start;
                assert!(range.end == END || length * blocks.len() as u64 <= 1_000, "{range:?}");
                for block in range.start..range.end.min(size.length().into()) {
                    read[usize::try_from(block).unwrap()] += 1;
                }
                place = at.next();
                steps += 1;
            }
            let length = usize::try_from(size.length()).unwrap();
            assert!(read[..length].iter().all(|times| *times == 1), "{blocks:?}: {read:?}");
            assert!(read[length..].iter().all(|times| *times == 0), "{blocks:?}");
            assert!(
                steps <= u64::from(size.length()) / size.range_length(STEP_BLOCKS) + 2,
                "{blocks:?}"
            );
        }
    }

    #[test]
    fn rounds_begin_at_different_blocks() {
        let size = size(&[100_000]);
        let mut starts: Vec<_> = (0..20).map(|_| Place::begin(&size).start).collect();
        starts.sort_unstable();
        starts.dedup();
        assert!(starts.len() > 10, "{starts:?}");
    }

    #[test]
    fn a_sample_reads_a_bounded_part_of_all_of_the_table() {
        for blocks in [&[2_049][..], &[1_000_000], &[500_000, 1_000_000], &[9_000; 64], &[90; 300]]
        {
            let size = size(blocks);
            let sample = size.sample();
            assert!(sample.read <= 2 * STATS_BLOCKS, "{blocks:?}: {}", sample.read);
            assert!(sample.read >= STATS_BLOCKS / 3, "{blocks:?}: {}", sample.read);
            for pair in sample.ranges.windows(2) {
                assert!(pair[0].end <= pair[1].start, "{blocks:?}: {:?}", sample.ranges);
            }
            let (first, last) = (&sample.ranges[0], sample.ranges.last().unwrap());
            assert!(
                first.start <= u64::from(size.length()) / 4 && last.end <= size.length().into()
            );
            let stats = sample.scale(&Stats { rows: sample.read * 40, ..Stats::default() });
            assert!(!stats.is_exact);
            let rows = size.blocks.iter().sum::<u64>() * 40;
            assert!(stats.rows.abs_diff(rows) < 2, "{} of {rows}", stats.rows);
        }
    }

    #[test]
    fn a_small_table_is_read_as_a_whole() {
        for blocks in [&[][..], &[0], &[2_048], &[1_024, 1_024]] {
            let sample = size(blocks).sample();
            assert!(matches!(&sample.ranges[..], [all] if *all == (0..END)));
            let stats = sample.scale(&Stats { rows: 7, ..Stats::default() });
            assert_eq!((stats.rows, stats.is_exact), (7, true));
        }
    }
}
