//! What several benches need: how they are run, rounds in turn, baselines, and where figures go.
//!
//! 1. A figure is a ratio against a baseline, or a cost, and has a name and a goal in [`goals`].
//! 2. Ours and the baseline are measured in turn, in rounds of one run, and the round's two are
//!    divided by each other: a machine whose speed drifts slows both. The figure is the median over
//!    the rounds.
//! 3. A baseline is what a careful engineer would write: prepared statements, a pool that is warm
//!    and does not ping, one statement where one is enough.
//! 4. A goal that is missed is said to be, beside the figure. No bench fails for it: a machine that
//!    does something else meanwhile is no defect.
#![allow(dead_code, reason = "every bench takes a part of it")]

pub(crate) mod calls;
pub(crate) mod database;
pub(crate) mod goals;
pub(crate) mod one_by_one;
pub(crate) mod ratios;
pub(crate) mod rounds;
pub(crate) mod run;
