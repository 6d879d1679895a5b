//! [`Trial`]: what a trial sends, what is right, and how it runs.

use std::pin::Pin;

use crate::judge::{Judge, Shown};

/// A trial.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) name: &'static str,
    pub(crate) sent: &'static str,
    /// What a right receiver does.
    pub(crate) right: &'static str,
    /// Words for a search engine.
    pub(crate) look_up: &'static [&'static str],
    pub(crate) run: fn(&Judge) -> Pin<Box<dyn Future<Output = Shown> + '_>>,
}
