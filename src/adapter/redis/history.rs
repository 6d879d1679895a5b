//! [`History`]: what the polls of one primary say about lost writes. Reads no clock and no connection.
//!
//! 1. A primary has a replication id. A replica that is promoted takes a new id, and names the old one as
//!    `master_replid2`, with the offset at which its copy of that history ends (`second_repl_offset`). So
//!    an offset of ours at or after that end is a proof: acknowledged writes are gone.
//! 2. An offset was read at a poll. Writes that were acknowledged after the last poll can be lost without
//!    a proof, so every new id is a suspicion at least. A restart takes a new id too.
//! 3. `FLUSHALL` keeps the id. The canary finds it: a key that holds a growing number.
//! 4. Writes acknowledged before a poll was sent are below the poll's offset. So the time of the last poll
//!    below the end bounds the loss: no earlier write is lost. The same holds for the canary's numbers,
//!    because a primary takes them under the id of the poll only.
//! 5. A slot brings keys of any age. So nothing bounds a loss at or before the time when slots have come.

use std::time::Duration;

use super::losses::LossKind;
use super::moment::Moment;

/// How many marks are kept: with polls of 1 s, they are at most 5 % of their age apart for years.
const MAX_MARKS: usize = 1024;
/// How often evictions are reported: a server that evicts does so all the time.
const EVICTIONS_EVERY: Duration = Duration::from_secs(60);
/// A primary that has had no replica for `repl-backlog-ttl` takes a new id without any loss. Between two
/// polls that are this close, it cannot have been a replica and have lost the trace of it, because that
/// takes at least a `repl-backlog-ttl` (1 h by default).
const CLOSE: Duration = Duration::from_secs(60);

/// What `INFO` said of a primary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Observation {
    /// Before `INFO` was sent.
    pub(super) at: Moment,
    /// The server's process: a restart changes it.
    pub(super) run: String,
    /// The replication id.
    pub(super) id: String,
    /// The id of the history that this primary has continued, if it has.
    pub(super) previous_id: Option<String>,
    /// The first offset of that history that this primary does not have.
    pub(super) previous_end: u64,
    pub(super) offset: u64,
    /// Keys evicted since the process began.
    pub(super) evicted: u64,
}

impl Observation {
    /// Reads a reply of `INFO`. `None` for a replica, and if a field is missing.
    pub(super) fn read(info: &str, at: Moment) -> Option<Self> {
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        if field("role")? != "master" {
            return None;
        }
        let previous = field("master_replid2").filter(|id| id.bytes().any(|byte| byte != b'0'));
        Some(Self {
            at,
            run: field("run_id").unwrap_or_default().to_owned(),
            id: field("master_replid")?.to_owned(),
            previous_id: previous.map(str::to_owned),
            // -1 without a previous history.
            previous_end: field("second_repl_offset").and_then(|it| it.parse().ok()).unwrap_or(0),
            offset: field("master_repl_offset")?.parse().ok()?,
            evicted: field("evicted_keys").and_then(|it| it.parse().ok()).unwrap_or(0),
        })
    }
}

/// What the canary's key held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Canary {
    /// Nothing was expected: this is its first write, or it may have expired.
    New,
    /// What was expected. All that was acknowledged before this time is there.
    Intact(Moment),
    /// A smaller number. What was acknowledged before this time is there; `None` if no time is known.
    Behind(Option<Moment>),
    /// Nothing, although it was there from this time on.
    Missing(Moment),
}

impl Canary {
    /// Returns `true` for a loss.
    pub(super) fn is_bad(&self) -> bool {
        matches!(self, Self::Behind(_) | Self::Missing(_))
    }
}

/// A loss. Writes that were acknowledged before `since` are not lost by it; `None` if any may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) kind: LossKind,
    pub(super) since: Option<Moment>,
}

impl Verdict {
    const fn new(kind: LossKind, since: Option<Moment>) -> Option<Self> {
        Some(Self { kind, since })
    }
}

/// The polls of one primary, and of those that took its place.
#[derive(Debug, Default)]
pub(super) struct History {
    last: Option<Observation>,
    /// The offsets under the last observation's id.
    offsets: Marks,
    /// When slots came last.
    gained_at: Option<Moment>,
    evictions_reported: Option<Moment>,
    has_unreported_evictions: bool,
}

impl History {
    /// Returns `true` if this primary continues the history of the last poll.
    pub(super) fn is_continued_by(&self, now: &Observation) -> bool {
        self.last.as_ref().is_some_and(|last| now.previous_id.as_ref() == Some(&last.id))
    }

    /// Returns `true` after the first poll with a reply to `INFO`.
    pub(super) fn has_polls(&self) -> bool {
        self.last.is_some()
    }

    /// Returns `true` until the next verdict [`Evicted`](LossKind::Evicted).
    pub(super) fn has_unreported_evictions(&self) -> bool {
        self.has_unreported_evictions
    }

    /// Takes in that the primary has slots that it did not have at the last poll.
    pub(super) fn gain_slots(&mut self, at: Moment) {
        self.gained_at = Some(at);
    }

    /// Returns what a poll says. `now` is `None` if the server refuses `INFO`.
    pub(super) fn judge(&self, now: Option<&Observation>, canary: Canary) -> Option<Verdict> {
        let mut verdict = self.verdict(now, canary)?;
        // Keys of any age came with the slots, and may be lost with what was written then.
        verdict.since = verdict.since.filter(|since| Some(*since) > self.gained_at);
        Some(verdict)
    }

    fn verdict(&self, now: Option<&Observation>, canary: Canary) -> Option<Verdict> {
        let (Some(last), Some(now)) = (&self.last, now) else { return by_canary(canary) };
        if now.id == last.id {
            let evicts = has_evicted(last, now);
            let reports =
                (evicts || self.has_unreported_evictions) && self.may_report_evictions(now);
            return match canary {
                // The server may have evicted the canary itself.
                Canary::Missing(_) if evicts => Verdict::new(LossKind::Evicted, None),
                Canary::New | Canary::Intact(_) if reports => Verdict::new(LossKind::Evicted, None),
                canary => by_canary(canary),
            };
        }
        if self.is_continued_by(now) {
            return self.after_promotion(last, now, canary);
        }
        match canary {
            Canary::Intact(_) if has_freed_its_backlog(last, now) => None,
            Canary::Intact(until) => Verdict::new(LossKind::Suspected, Some(until)),
            // An earlier loss may have taken the canary's last write along.
            Canary::New => Verdict::new(LossKind::Suspected, None),
            canary => by_canary(canary),
        }
    }

    /// The new primary has our history, up to an offset.
    fn after_promotion(
        &self,
        last: &Observation,
        now: &Observation,
        canary: Canary,
    ) -> Option<Verdict> {
        let is_cut = last.offset >= now.previous_end;
        let by_offset = self.offsets.last_below(now.previous_end);
        match canary {
            Canary::New | Canary::Intact(_) => {
                let kind = if is_cut { LossKind::Rewound } else { LossKind::Suspected };
                let until = if let Canary::Intact(until) = canary { Some(until) } else { None };
                Verdict::new(kind, by_offset.max(until))
            }
            Canary::Behind(until) => Verdict::new(LossKind::Rewound, by_offset.max(until)),
            // Its first write may be one of those that the new primary never got.
            Canary::Missing(seeded) if by_offset.is_none_or(|bound| seeded >= bound) => {
                Verdict::new(LossKind::Rewound, by_offset)
            }
            Canary::Missing(_) => Verdict::new(LossKind::Emptied, None),
        }
    }

    /// Takes a poll in, after [`judge`](Self::judge) has returned the kind.
    pub(super) fn record(&mut self, now: Observation, kind: Option<LossKind>) {
        if kind == Some(LossKind::Evicted) {
            self.evictions_reported = Some(now.at);
            self.has_unreported_evictions = false;
        } else {
            self.has_unreported_evictions |=
                self.last.as_ref().is_some_and(|last| has_evicted(last, &now));
        }
        if self.last.as_ref().is_none_or(|last| last.id != now.id) {
            self.offsets = Marks::default();
        }
        self.offsets.push(now.at, now.offset);
        self.last = Some(now);
    }

    fn may_report_evictions(&self, now: &Observation) -> bool {
        self.evictions_reported.is_none_or(|told| told.until(now.at) >= EVICTIONS_EVERY)
    }
}

/// Returns `true` if keys were evicted after the last poll. A new process may have evicted them all since,
/// and `CONFIG RESETSTAT` counts from 0 again.
fn has_evicted(last: &Observation, now: &Observation) -> bool {
    let counts_on = now.run == last.run && now.evicted >= last.evicted;
    now.evicted > if counts_on { last.evicted } else { 0 }
}

fn by_canary(canary: Canary) -> Option<Verdict> {
    match canary {
        Canary::New | Canary::Intact(_) => None,
        Canary::Behind(until) => Verdict::new(LossKind::Rewound, until),
        Canary::Missing(_) => Verdict::new(LossKind::Emptied, None),
    }
}

fn has_freed_its_backlog(last: &Observation, now: &Observation) -> bool {
    last.run == now.run
        && now.previous_id.is_none()
        && now.offset >= last.offset
        && last.at.until(now.at) <= CLOSE
}

/// Growing positions of a stream, each with a time: all that was acknowledged before the time is at the
/// position or below it.
#[derive(Debug, Default)]
pub(super) struct Marks(Vec<(Moment, u64)>);

impl Marks {
    pub(super) fn push(&mut self, at: Moment, position: u64) {
        if self.0.len() == MAX_MARKS {
            let marks = &self.0;
            let span = |from: usize, to: usize| marks[from].0.until(marks[to].0).as_millis();
            // The distance of two marks grows with their age.
            let worth = |&mark: &usize| {
                let gap = span(mark - 1, mark + 1);
                let age = span(mark, MAX_MARKS - 1) + 1;
                (gap << 32) / age
            };
            if let Some(least) = (1..MAX_MARKS - 1).min_by_key(worth) {
                self.0.remove(least);
            }
        }
        self.0.push((at, position));
    }

    /// Returns the time of the last mark below `end`. All that was acknowledged before it is below `end`.
    pub(super) fn last_below(&self, end: u64) -> Option<Moment> {
        self.0.iter().rev().find(|mark| mark.1 < end).map(|mark| mark.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    fn time(second: u64) -> Moment {
        static BEGIN: LazyLock<Moment> = LazyLock::new(Moment::now);
        *BEGIN + Duration::from_secs(second)
    }

    /// What the process `run` says of the history `id` at a second.
    fn seen(second: u64, run: &str, id: &str, offset: u64) -> Observation {
        Observation {
            at: time(second),
            run: run.to_owned(),
            id: id.to_owned(),
            previous_id: None,
            previous_end: 0,
            offset,
            evicted: 0,
        }
    }

    impl Observation {
        fn after(mut self, id: &str, end: u64) -> Self {
            self.previous_id = Some(id.to_owned());
            self.previous_end = end;
            self
        }

        fn evicting(mut self, keys: u64) -> Self {
            self.evicted = keys;
            self
        }
    }

    /// Polls of process `p` and history `a` at the seconds 0 to 3, with the offsets 100 to 400.
    fn polled() -> History {
        let mut history = History::default();
        for second in 0..4 {
            history.record(seen(second, "p", "a", 100 * (second + 1)), None);
        }
        history
    }

    fn intact(second: u64) -> Canary {
        Canary::Intact(time(second))
    }

    use LossKind::{Emptied, Evicted, Rewound, Suspected};

    #[test]
    fn verdict_of_each_observation() {
        let b = |offset| seen(4, "q", "b", offset);
        let any = None;
        let since = |second| Some(time(second));
        let cases = [
            // The same history.
            ("it grows", seen(4, "p", "a", 500), intact(3), None),
            ("first canary", seen(4, "p", "a", 500), Canary::New, None),
            ("flushed", seen(4, "p", "a", 500), Canary::Missing(time(0)), Some((Emptied, any))),
            ("old", seen(4, "p", "a", 500), Canary::Behind(since(1)), Some((Rewound, since(1)))),
            ("evicted", seen(4, "p", "a", 500).evicting(1), intact(3), Some((Evicted, any))),
            (
                "the canary is evicted",
                seen(4, "p", "a", 500).evicting(1),
                Canary::Missing(time(0)),
                Some((Evicted, any)),
            ),
            (
                "another process evicts",
                seen(4, "q", "a", 500).evicting(1),
                intact(3),
                Some((Evicted, any)),
            ),
            // A promoted replica: the history ends at an offset.
            ("promoted", b(400).after("a", 401), Canary::New, Some((Suspected, since(3)))),
            ("canary is later", b(400).after("a", 401), intact(4), Some((Suspected, since(4)))),
            ("at the end", b(399).after("a", 400), Canary::New, Some((Rewound, since(2)))),
            ("cut", b(250).after("a", 250), Canary::New, Some((Rewound, since(1)))),
            ("cut, canary is later", b(250).after("a", 250), intact(2), Some((Rewound, since(2)))),
            ("cut before the first poll", b(90).after("a", 90), Canary::New, Some((Rewound, any))),
            (
                "only the canary is lost",
                b(400).after("a", 401),
                Canary::Behind(since(2)),
                Some((Rewound, since(3))),
            ),
            (
                "the canary's first write is lost",
                b(250).after("a", 250),
                Canary::Missing(time(2)),
                Some((Rewound, since(1))),
            ),
            (
                "promoted and flushed",
                b(400).after("a", 401),
                Canary::Missing(time(0)),
                Some((Emptied, any)),
            ),
            // Another history: a restart, or two promotions between two polls.
            ("restarted", b(0), intact(3), Some((Suspected, since(3)))),
            ("restarted at the same offset", b(400), intact(3), Some((Suspected, since(3)))),
            ("restarted, first canary", b(0), Canary::New, Some((Suspected, any))),
            ("promoted twice", b(400).after("c", 300), intact(3), Some((Suspected, since(3)))),
            ("restarted old", b(0), Canary::Behind(since(1)), Some((Rewound, since(1)))),
            ("restarted empty", b(0), Canary::Missing(time(0)), Some((Emptied, any))),
            // A primary without replicas takes a new id after a while.
            ("backlog freed", seen(4, "p", "b", 400), intact(3), None),
            ("after a pause", seen(90, "p", "b", 400), intact(3), Some((Suspected, since(3)))),
            ("went back", seen(4, "p", "b", 399), intact(3), Some((Suspected, since(3)))),
            (
                "was a replica",
                seen(4, "p", "b", 400).after("c", 1),
                intact(3),
                Some((Suspected, since(3))),
            ),
            (
                "freed, flushed",
                seen(4, "p", "b", 400),
                Canary::Missing(time(0)),
                Some((Emptied, any)),
            ),
        ];
        for (name, now, canary, expected) in cases {
            let verdict = polled().judge(Some(&now), canary).map(|it| (it.kind, it.since));
            assert_eq!(verdict, expected, "{name}");
        }
    }

    #[test]
    fn loss_of_what_came_with_slots_has_no_bound() {
        let b = |end| seen(4, "q", "b", 400).after("a", end);
        let restarted = seen(4, "q", "b", 400);
        let flushed = Canary::Behind(Some(time(1)));
        let cases = [
            // The slots came at second 2, after the poll of that second.
            ("cut before", b(150), Canary::New, (Rewound, None)),
            ("cut at the gain", b(301), Canary::New, (Rewound, None)),
            ("cut at the next poll", b(400), Canary::New, (Rewound, None)),
            ("not cut", b(401), Canary::New, (Suspected, Some(time(3)))),
            ("restarted", restarted.clone(), intact(2), (Suspected, None)),
            ("restarted later", restarted, intact(3), (Suspected, Some(time(3)))),
            ("old", seen(4, "p", "a", 500), flushed, (Rewound, None)),
        ];
        for (name, now, canary, (kind, since)) in cases {
            let mut history = polled();
            history.gain_slots(time(2) + Duration::from_millis(1));
            assert_eq!(history.judge(Some(&now), canary), Verdict::new(kind, since), "{name}");
        }
    }

    #[test]
    fn first_contact_says_nothing() {
        let history = History::default();
        let now = seen(0, "p", "b", 5).after("a", 3).evicting(7);
        assert_eq!(history.judge(Some(&now), Canary::New), None);
    }

    #[test]
    fn canary_alone_decides_without_info() {
        let history = polled();
        assert_eq!(history.judge(None, Canary::New), None);
        assert_eq!(history.judge(None, intact(3)), None);
        let missing = history.judge(None, Canary::Missing(time(0)));
        assert_eq!(missing, Verdict::new(Emptied, None));
        let behind = history.judge(None, Canary::Behind(Some(time(2))));
        assert_eq!(behind, Verdict::new(Rewound, Some(time(2))));
    }

    /// Judges a poll and takes it in.
    fn poll(history: &mut History, now: Observation, canary: Canary) -> Option<LossKind> {
        let kind = history.judge(Some(&now), canary).map(|verdict| verdict.kind);
        history.record(now, kind);
        kind
    }

    #[test]
    fn evictions_are_told_once_a_minute_and_none_is_left_out() {
        let mut history = polled();
        let mut told = Vec::new();
        let hour = Duration::from_secs(3_600);
        for second in 4..200 {
            // They end at second 100. The clock is set back at second 50.
            let mut now = seen(second, "p", "a", 1_000 + second).evicting(second.min(100));
            if second >= 50 {
                now.at = now.at.set_clock(time(second).by_clock_of(time(second)) - hour);
            }
            if poll(&mut history, now, intact(second - 1)).is_some() {
                told.push(second);
            }
            assert_eq!(
                history.has_unreported_evictions(),
                second < 124 && ![4, 64].contains(&second)
            );
        }
        assert_eq!(told, [4, 64, 124]);
    }

    #[test]
    fn evictions_hide_no_other_loss_and_no_other_loss_hides_them() {
        let mut history = polled();
        let p = |second, evicted| seen(second, "p", "a", 1_000 + second).evicting(evicted);
        let missing = Canary::Missing(time(0));
        assert_eq!(poll(&mut history, p(4, 1), intact(3)), Some(Evicted));
        // Within the minute.
        assert_eq!(poll(&mut history, p(5, 1), missing), Some(Emptied));
        assert_eq!(poll(&mut history, p(6, 2), intact(5)), None);
        assert!(history.has_unreported_evictions());
        assert_eq!(poll(&mut history, p(7, 2), missing), Some(Emptied));
        assert_eq!(poll(&mut history, p(8, 3), missing), Some(Evicted));
        assert!(!history.has_unreported_evictions());
        assert_eq!(poll(&mut history, p(9, 4), Canary::Behind(None)), Some(Rewound));
        // After the minute: another loss is reported first.
        assert_eq!(poll(&mut history, p(68, 4), Canary::Behind(None)), Some(Rewound));
        assert_eq!(poll(&mut history, p(69, 4), intact(68)), Some(Evicted));
        // The old primary's, before a failover.
        assert_eq!(poll(&mut history, p(70, 5), intact(69)), None);
        let promoted = seen(71, "q", "b", 2_000).after("a", 2_000);
        assert_eq!(poll(&mut history, promoted, intact(70)), Some(Suspected));
        assert_eq!(poll(&mut history, seen(129, "q", "b", 2_001), intact(71)), Some(Evicted));
        assert_eq!(poll(&mut history, seen(190, "q", "b", 2_002), intact(71)), None);
    }

    #[test]
    fn evictions_of_another_process_are_told_after_the_failover() {
        let mut history = polled();
        assert_eq!(
            poll(&mut history, seen(4, "p", "a", 500).evicting(3), intact(3)),
            Some(Evicted)
        );
        let other = seen(70, "q", "b", 500).after("a", 501).evicting(9);
        assert_eq!(poll(&mut history, other, intact(4)), Some(Suspected));
        let other = seen(71, "q", "b", 600).evicting(9);
        assert_eq!(poll(&mut history, other.clone(), intact(70)), Some(Evicted));
        assert_eq!(poll(&mut history, Observation { at: time(140), ..other }, intact(71)), None);
        // After `CONFIG RESETSTAT`.
        assert_eq!(poll(&mut history, seen(141, "q", "b", 700).evicting(0), intact(140)), None);
        let evicts = seen(142, "q", "b", 800).evicting(5);
        assert_eq!(poll(&mut history, evicts, intact(141)), Some(Evicted));
        let fewer_after_a_reset = seen(242, "q", "b", 900).evicting(1);
        assert_eq!(poll(&mut history, fewer_after_a_reset, intact(142)), Some(Evicted));
    }

    #[test]
    fn offsets_of_another_history_bound_nothing() {
        let mut history = polled();
        history.record(seen(4, "q", "b", 150), None);
        let now = seen(5, "r", "c", 120).after("b", 120);
        assert_eq!(history.judge(Some(&now), Canary::New), Verdict::new(Rewound, None));
    }

    /// A process writes to the primary that a partition cuts off, and finds the other one, then the old one.
    #[test]
    fn two_primaries_are_told_at_each_change() {
        let mut history = polled();
        let other = seen(4, "q", "b", 320).after("a", 310);
        let verdict = history.judge(Some(&other), Canary::Behind(Some(time(1))));
        assert_eq!(verdict, Verdict::new(Rewound, Some(time(2))));
        history.record(other, None);
        let old = seen(5, "p", "a", 500);
        assert_eq!(history.judge(Some(&old), Canary::New), Verdict::new(Suspected, None));
        history.record(old, None);
        let demoted = seen(6, "q", "b", 340).after("a", 310);
        let verdict = history.judge(Some(&demoted), Canary::New);
        assert_eq!(verdict.map(|it| it.kind), Some(Rewound));
    }

    #[test]
    fn marks_keep_a_bound_for_a_long_time() {
        let mut marks = Marks::default();
        for second in 0..6_000 {
            marks.push(time(second), second * 10);
        }
        assert!(marks.0.len() <= MAX_MARKS);
        for second in [0, 10, 3_000, 5_000, 5_900, 5_990, 5_999] {
            let bound = marks.last_below(second * 10 + 1).unwrap();
            assert!(bound <= time(second), "{second}");
            let off = bound.until(time(second));
            let age = Duration::from_secs(5_999 - second);
            assert!(off <= age / 20 + Duration::from_secs(1), "{second}: {off:?}");
        }
        assert_eq!(marks.last_below(0), None);
    }

    #[test]
    fn info_of_a_primary_is_read() {
        let info = "# Server\r\nrun_id:r1\r\n# Replication\r\nrole:master\r\nmaster_replid:aa\r\n\
                    master_replid2:bb\r\nmaster_repl_offset:48970\r\nsecond_repl_offset:48951\r\n\
                    # Stats\r\nevicted_keys:3\r\n";
        let expected = seen(0, "r1", "aa", 48_970).after("bb", 48_951).evicting(3);
        assert_eq!(Observation::read(info, time(0)), Some(expected));
        let zeros = info.replace(":bb", ":00").replace(":48951", ":-1");
        let expected = seen(0, "r1", "aa", 48_970).evicting(3);
        assert_eq!(Observation::read(&zeros, time(0)), Some(expected));
        assert_eq!(Observation::read(&info.replace("master\r", "slave\r"), time(0)), None);
        assert_eq!(Observation::read("", time(0)), None);
    }
}
