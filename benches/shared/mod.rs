//! Parts that several benches share: options, rounds, baselines, goals and output.
//!
//! 1. A figure is a ratio to a baseline, or a cost. It has a name in [`goals`], and a goal if the disk does not
//!    decide it.
//! 2. The adapter and the baseline are measured in turn, in rounds of one run. Each round gives one
//!    ratio, so a change in machine speed affects both sides. The figure is the median of the rounds.
//! 3. A baseline is the code of a careful engineer: prepared statements, a warm pool without pings,
//!    and one statement where one is enough.
//! 4. A missed goal is printed as missed. It fails no bench, because a busy machine is no defect.
#![allow(dead_code, reason = "each bench uses only some of these items")]

pub(crate) mod calls;
pub(crate) mod compare;
pub(crate) mod database;
pub(crate) mod goals;
pub(crate) mod one_by_one;
pub(crate) mod ratios;
pub(crate) mod rounds;
pub(crate) mod run;
pub(crate) mod usage;
