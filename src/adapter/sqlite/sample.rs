//! [`Sample`]: the statistics of a large table, from a part of its rows.
//!
//! SQLite returns no row by its number, and ids are texts of any form, so a random key is not at hand. The
//! sample walks down the tree of the ids' prefixes instead (Knuth's estimate of the size of a tree):
//!
//! 1. At a prefix, the ids fall into groups by their next character. A group of at most [`MAX_GROUP`]
//!    rows is counted.
//! 2. One of the larger groups is chosen, and stands for all of them: its rows weigh as much more. The
//!    walk goes on in this group, until no larger group is left.
//! 3. Each namespace with more than [`MAX_NAMESPACE`] rows is walked several times, and the mean of the
//!    walks is taken. The walks choose the groups of a prefix in turn.
//!
//! The mean is the right one whatever the ids look like, up to 10,000 namespaces and 256 groups of a prefix:
//! what is beyond is not counted. The spread depends on how evenly the groups of a
//! prefix are filled.

use std::collections::HashMap;

use rand::seq::{IndexedRandom as _, SliceRandom as _};

use super::super::inspection::Stats;
use super::place::Place;
use super::store::SqliteStore;

const MAX_NAMESPACE: u32 = 1_000;
const MAX_GROUP: u32 = 50;
/// How many namespaces and how many groups of a prefix are told apart.
const MAX_NAMESPACES: usize = 10_000;
const MAX_GROUPS: usize = 256;
/// How many walks a sample has in all, if the namespaces are fewer.
const WALKS: usize = 32;
/// How many statements a sample has, about. A sample needs about 3,000 of them; ids that are made to have
/// many groups need more.
const MAX_STATEMENTS: usize = 30_000;

/// A sample of a large table.
pub(super) struct Sample<'s> {
    store: &'s SqliteStore,
    /// The prefixes that were read, by namespace and prefix.
    prefixes: HashMap<(String, String), Groups>,
    statements: usize,
}

/// The groups of the ids with one prefix.
#[derive(Clone)]
struct Groups {
    /// The rows of the small groups.
    small: Stats,
    /// The prefixes of the large groups, in a random order.
    large: Vec<String>,
    chosen: usize,
}

impl<'s> Sample<'s> {
    pub(super) fn new(store: &'s SqliteStore) -> Self {
        Self { store, prefixes: HashMap::new(), statements: 0 }
    }

    /// Returns the estimated statistics of the whole table.
    pub(super) async fn stats(mut self) -> Result<Stats, sqlx::Error> {
        let (mut total, mut large) = (Stats::default(), Vec::new());
        for first in self.namespaces().await? {
            let end = Place::after_namespace(&first.namespace);
            let counted = self.store.count(&first, &end, MAX_NAMESPACE + 1).await?;
            if counted.rows > u64::from(MAX_NAMESPACE) {
                large.push(first.namespace);
            } else {
                total.add(&counted);
            }
        }
        large.shuffle(&mut rand::rng());
        let walked = &large[..large.len().min(WALKS)];
        let mut sum = Stats::default();
        for namespace in walked {
            let (mut walks, mut rows) = (0, Stats::default());
            while walks < (WALKS / walked.len()) as u64
                && let Some(walk) = self.walk(namespace).await?
            {
                rows.add(&walk);
                walks += 1;
            }
            let (walks, each) = (walks.max(1), large.len() as u64);
            sum.add(&rows.map_counts(|keys| (keys / walks).saturating_mul(each)));
        }
        let walked = walked.len().max(1) as u64;
        total.add(&sum.map_counts(|keys| keys / walked));
        Ok(total)
    }

    /// Returns a random place: one before a prefix that many ids have.
    pub(super) async fn place(mut self) -> Result<Place, sqlx::Error> {
        let namespaces = self.namespaces().await?;
        let Some(first) = namespaces.choose(&mut rand::rng()) else { return Ok(Place::default()) };
        let mut place = Place::before_namespace(&first.namespace);
        while self.statements <= MAX_STATEMENTS
            && let Some(group) = self.read(&place.namespace, &place.id).await?.large.pop()
        {
            place.id = group;
        }
        Ok(place)
    }

    /// Returns the first key of each namespace.
    async fn namespaces(&self) -> Result<Vec<Place>, sqlx::Error> {
        let (mut namespaces, mut from, end) = (Vec::new(), Place::default(), Place::end());
        while namespaces.len() < MAX_NAMESPACES
            && let Some(first) = self.store.key_at(&from, &end, 0).await?
        {
            from = Place::after_namespace(&first.namespace);
            namespaces.push(first);
        }
        Ok(namespaces)
    }

    /// Walks once through a namespace. Returns the rows of the namespace, as this walk estimates them;
    /// `None` if the sample has no statements left.
    async fn walk(&mut self, namespace: &str) -> Result<Option<Stats>, sqlx::Error> {
        let (mut rows, mut weight, mut prefix) = (Stats::default(), 1_u64, String::new());
        loop {
            let place = (namespace.to_owned(), prefix.clone());
            if !self.prefixes.contains_key(&place) {
                if self.statements > MAX_STATEMENTS {
                    return Ok(None);
                }
                let groups = self.read(namespace, &prefix).await?;
                self.prefixes.insert(place.clone(), groups);
            }
            let Some(groups) = self.prefixes.get_mut(&place) else { return Ok(None) };
            rows.add(&groups.small.clone().map_counts(|keys| keys.saturating_mul(weight)));
            if groups.large.is_empty() {
                return Ok(Some(rows));
            }
            weight = weight.saturating_mul(groups.large.len() as u64);
            groups.chosen += 1;
            prefix.clone_from(&groups.large[groups.chosen % groups.large.len()]);
        }
    }

    /// Reads the groups of a prefix.
    async fn read(&mut self, namespace: &str, prefix: &str) -> Result<Groups, sqlx::Error> {
        let mut groups = Groups { small: Stats::default(), large: Vec::new(), chosen: 0 };
        let mut from = Place { namespace: namespace.to_owned(), id: prefix.to_owned() };
        let end = Place::after_ids(namespace, prefix);
        for _ in 0..MAX_GROUPS {
            self.statements += 2;
            let Some(first) = self.store.key_at(&from, &end, 0).await? else { break };
            let next = first.id.get(prefix.len()..).and_then(|rest| rest.chars().next());
            let mut group = prefix.to_owned();
            group.extend(next);
            from = match next {
                Some(_) => Place::after_ids(namespace, &group),
                // The id is the prefix itself. No id holds a NUL.
                None => Place { namespace: namespace.to_owned(), id: format!("{prefix}\0") },
            };
            let counted = self.store.count(&first, &from, MAX_GROUP + 1).await?;
            if counted.rows > u64::from(MAX_GROUP) {
                groups.large.push(group);
            } else {
                groups.small.add(&counted);
            }
        }
        groups.large.shuffle(&mut rand::rng());
        Ok(groups)
    }
}
