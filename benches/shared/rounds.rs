//! Rounds in turn, and the load of many callers.

use std::future::Future;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::run::Run;

/// Makes one call after another, and waits for each.
pub(crate) trait Caller: Send + 'static {
    /// Makes one call. Panics if the result is not the expected one.
    fn call(&mut self) -> impl Future<Output = ()> + Send;
}

/// The result of one measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) calls: f64,
    pub(crate) per_second: f64,
    pub(crate) p50: Duration,
}

/// Runs every caller in its own task for this time, and for at least one call. The result includes calls
/// that run at the end of the time, with their time.
pub(crate) async fn load<C: Caller>(callers: impl IntoIterator<Item = C>, time: Duration) -> Load {
    let start = Instant::now();
    let until = start + time;
    let mut tasks: JoinSet<_> = callers
        .into_iter()
        .map(|mut caller| async move {
            let mut latencies = Vec::new();
            let mut now = Instant::now();
            loop {
                caller.call().await;
                let ended = Instant::now();
                latencies.push(ended - now);
                now = ended;
                if now >= until {
                    return latencies;
                }
            }
        })
        .collect();
    let mut all = Vec::new();
    while let Some(latencies) = tasks.join_next().await {
        all.push(latencies.expect("a caller that ends"));
    }
    let elapsed = start.elapsed();
    let mut latencies = all.concat();
    assert!(!latencies.is_empty(), "there are callers");
    let middle = latencies.len() / 2;
    let p50 = *latencies.select_nth_unstable(middle).1;
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² calls")]
    let calls = latencies.len() as f64;
    Load { calls, per_second: calls / elapsed.as_secs_f64(), p50 }
}

/// Measures `N` sides in turn: each once as a warm-up, then in rounds. Every second round has the
/// reverse order.
pub(crate) async fn in_turn<T, const N: usize>(
    run: &Run,
    mut measure: impl AsyncFnMut(usize) -> T,
) -> Vec<[T; N]> {
    if !run.is_test() {
        for which in 0..N {
            measure(which).await;
        }
    }
    let mut rounds = Vec::new();
    for round in 0..run.rounds() {
        let mut of_round: [Option<T>; N] = std::array::from_fn(|_| None);
        for step in 0..N {
            let which = if round % 2 == 0 { step } else { N - 1 - step };
            of_round[which] = Some(measure(which).await);
        }
        rounds.push(of_round.map(|measured| measured.expect("each side once per round")));
    }
    rounds
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) async fn check(run: &Run) {
    struct Sleeper;
    impl Caller for Sleeper {
        async fn call(&mut self) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let Load { calls, per_second, p50 } = load([Sleeper, Sleeper], run.time()).await;
    assert!(p50 >= Duration::from_millis(1) && per_second <= 2_000.0, "{per_second} {p50:?}");
    assert!(calls >= 2.0);
    assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
    assert!((median([4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    let mut order = Vec::new();
    let run = Run::parse(["--bench".to_owned(), "--quick".to_owned()]).expect("options");
    let rounds = in_turn::<_, 2>(&run, async |which| {
        order.push(which);
        order.len()
    });
    assert_eq!(rounds.await, [[3, 4], [6, 5], [7, 8]]);
    assert_eq!(order, [0, 1, 0, 1, 1, 0, 0, 1]);
}
