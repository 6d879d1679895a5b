//! The adapter and its baseline on one server, measured in turn.

use std::future::Future;
use std::time::Duration;

use super::goals::grouped;
use super::ratios::{report, skipped};
use super::rounds::{Caller, Load, in_turn, load, median};
use super::run::Run;
use super::usage::own_cpu;

/// How many callers each side has.
const CALLERS: usize = 64;

/// What both sides are measured on.
pub(crate) trait Bed {
    /// Makes the store of a side as it is before each measurement.
    fn reset(&self, side: usize) -> impl Future<Output = ()>;

    /// Returns the CPU time that the server has used; `None` if it is unknown.
    fn cpu(&self) -> impl Future<Output = Option<Duration>>;
}

/// The result of one measurement.
pub(crate) struct Measured {
    pub(crate) load: Load,
    /// CPU time of this process for one call, in microseconds: the adapter or the baseline, and its callers.
    client_us: f64,
    /// CPU time of the server for one call.
    pub(crate) server_us: Option<f64>,
}

impl Measured {
    /// Measures one side.
    pub(crate) async fn of<C: Caller>(
        run: &Run,
        bed: &impl Bed,
        side: usize,
        callers: impl IntoIterator<Item = C>,
    ) -> Self {
        bed.reset(side).await;
        let (client, server) = (own_cpu(), bed.cpu().await);
        let load = load(callers, run.time()).await;
        let of_each = |time: Duration| time.as_secs_f64() * 1e6 / load.calls;
        let server = server.zip(bed.cpu().await).map(|(before, after)| after - before);
        Self { load, client_us: of_each(own_cpu() - client), server_us: server.map(of_each) }
    }
}

/// Measures 64 callers of each side in turn, and reports the calls a second of ours over those of the baseline. Returns
/// nothing if the figure is not selected.
pub(crate) async fn compare<A: Caller + Clone, B: Caller + Clone>(
    run: &Run,
    bed: &impl Bed,
    name: &str,
    ours: A,
    baseline: B,
) -> Vec<[Measured; 2]> {
    if !run.wants(&[name]) {
        return Vec::new();
    }
    let rounds = in_turn::<_, 2>(run, async |side| {
        if side == 0 {
            Measured::of(run, bed, 0, vec![ours.clone(); CALLERS]).await
        } else {
            Measured::of(run, bed, 1, vec![baseline.clone(); CALLERS]).await
        }
    });
    let rounds = rounds.await;
    report_rates(run, name, &rounds);
    rounds
}

/// Reports the calls a second of the first side over those of the second.
pub(crate) fn report_rates(run: &Run, name: &str, rounds: &[[Measured; 2]]) {
    let ratios = rounds.iter().map(|[ours, other]| ours.load.per_second / other.load.per_second);
    let both = |value: fn(&Measured) -> f64, shown: fn(f64) -> String| {
        let median = |side: usize| median(rounds.iter().map(|round| value(&round[side])));
        format!("{} over {}", shown(median(0)), shown(median(1)))
    };
    let us = |value| format!("{value:.1}");
    let note = format!(
        "{} a second, p50 {} µs; CPU of a call: client {} µs, server {} µs",
        both(|it| it.load.per_second, grouped),
        both(|it| it.load.p50.as_secs_f64() * 1e6, us),
        both(|it| it.client_us, us),
        both(|it| it.server_us.unwrap_or(f64::NAN), us),
    );
    report(run, name, &ratios.collect::<Vec<_>>(), &note);
}

/// Reports the CPU of the server for a call of the first side over that of the second.
pub(crate) fn report_server(run: &Run, name: &str, rounds: &[[Measured; 2]]) {
    let ratios = rounds.iter().map(|[ours, other]| Some(ours.server_us? / other.server_us?));
    match ratios.collect::<Option<Vec<_>>>() {
        Some(ratios) if !ratios.is_empty() => report(run, name, &ratios, "CPU of the server"),
        _ => skipped(run, name, "only on Linux, with the bench's own server"),
    }
}
