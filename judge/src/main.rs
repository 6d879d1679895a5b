//! The command `tower-dedup-judge`: attacks a webhook receiver as senders do.

mod delivery;
mod effects;
mod judge;
mod options;
mod process;
mod report;
mod target;
mod trial;
mod trials;
mod wire;

use std::cell::{Cell, RefCell};
use std::env;
use std::fs::OpenOptions;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tokio::time::{Instant, interval_at, timeout_at};
use tower_dedup::provider;

use delivery::{Ids, Place, Signer, Template};
use effects::Counter;
use judge::{Judge, Stop};
use options::Options;
use process::Receiver;
use target::Target;
use trial::Trial;

/// How often a long trial is told.
const TOLD: Duration = Duration::from_secs(10);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    if options.list {
        for Trial { name, sent, right, .. } in trials::all() {
            report::say(&format!("{name}\n    sent: {sent}\n    right: {right}"));
        }
        return ExitCode::SUCCESS;
    }
    // A judge that is dropped kills the receiver.
    let ended = tokio::select! {
        ended = run(&options) => ended,
        () = stopped() => Err("stopped".to_owned()),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            report::tell(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

/// Waits for Ctrl-C, SIGTERM or SIGHUP.
async fn stopped() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};

        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let mut signals: Vec<_> = kinds.into_iter().filter_map(|kind| signal(kind).ok()).collect();
        let signals = signals.iter_mut().map(|signal| Box::pin(signal.recv()));
        futures_util::future::select_all(signals).await;
    }
    #[cfg(not(unix))]
    {
        let _ = tokio::signal::ctrl_c().await;
    }
}

/// Runs the trials. Returns `false` if one has failed.
async fn run(options: &Options) -> Result<bool, String> {
    let deadline = Instant::now() + options.timeout;
    let judge = prepare(options).await?;
    match timeout_at(deadline, watched("the first event", judge.begin())).await {
        Err(_) => return Err("the first event is not handled within --timeout".to_owned()),
        Ok(Err(Stop::Fail(why))) => {
            return Err(format!(
                "the receiver cannot be judged, because an ordinary event is not handled: {why} \
                 (see --sender, --id, --secret-env and --count)"
            ));
        }
        Ok(Err(Stop::Unknown(why) | Stop::Cut(why))) => return Err(why),
        Ok(Ok(())) => {}
    }
    let (mut is_right, mut cut) = (true, None);
    let is_chosen = |name| options.only.is_empty() || options.only.iter().any(|only| only == name);
    for trial in trials::all().filter(|trial| is_chosen(trial.name)) {
        let begun = Instant::now();
        let work = async {
            judge.ready().await?;
            (trial.run)(&judge).await
        };
        let shown = match watched(trial.name, timeout_at(deadline, work)).await {
            Ok(shown) => shown,
            Err(_) => Err(Stop::Cut("not ended: --timeout is over".to_owned())),
        };
        report::print(trial, &shown, begun.elapsed(), judge.counter.is_some(), options.json);
        match shown {
            Err(Stop::Fail(_)) => is_right = false,
            Err(Stop::Cut(why)) => cut = Some(why),
            Err(Stop::Unknown(_)) | Ok(_) => {}
        }
    }
    match cut {
        Some(why) if is_right => Err(format!("a trial has no verdict: {why}")),
        _ => Ok(is_right),
    }
}

/// Tells on stderr if this takes long.
async fn watched<T>(name: &str, work: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let mut ticks = interval_at(begun + TOLD / 2, TOLD);
    let mut work = pin!(work);
    loop {
        tokio::select! {
            ended = &mut work => return ended,
            _ = ticks.tick() => report::tell(&format!("{name}: {} s", begun.elapsed().as_secs())),
        }
    }
}

async fn prepare(options: &Options) -> Result<Judge, String> {
    let anywhere = options.i_own_this_host;
    let target = Target::resolve(&options.url, anywhere).await?;
    let preset = match &options.sender {
        Some(name) => {
            let found = provider::find(name);
            let known = || provider::ALL.iter().map(|it| it.name()).collect::<Vec<_>>().join(", ");
            Some(found.ok_or_else(|| format!("no sender `{name}` is known, but {}", known()))?)
        }
        None => None,
    };
    let sample = preset.map(|preset| Template::of_preset(preset, &target.path));
    let place = match (&options.id, &sample) {
        (Some(place), _) => Place::parse(place)?,
        (None, Some(sample)) => sample.place.clone(),
        (None, None) => return Err("what is delivered? --sender or --id says it".to_owned()),
    };
    let read = |file: &Option<_>| {
        file.as_deref().map(|file| Template::read(file, place.clone())).transpose()
    };
    let template = match (read(&options.request)?, sample) {
        (Some(template), _) => template,
        (None, Some(sample)) if options.id.is_none() => sample,
        (None, _) => Template::with_id(place.clone(), &target.path)?,
    };
    let signer = match (preset, &options.secret_env) {
        (Some(preset), Some(variable)) => {
            let secret = env::var(variable).map_err(|error| format!("{variable}: {error}"))?;
            let url = || format!("http://{}", target.authority);
            Some(Signer::new(preset, secret, options.public_url.clone().unwrap_or_else(url))?)
        }
        _ => None,
    };
    let counter = match (&options.count, &options.count_url) {
        (Some(command), _) => Some(Counter::Command(command.clone())),
        (None, Some(url)) => Some(Counter::Url(Target::resolve(url, anywhere).await?)),
        (None, None) => None,
    };
    if options.start.is_some() && !cfg!(unix) {
        return Err("--start needs process groups, which only Unix has".to_owned());
    }
    let log = match &options.log {
        Some(file) => Some(
            OpenOptions::new()
                .append(true)
                .create(true)
                .open(file)
                .map_err(|error| format!("{}: {error}", file.display()))?,
        ),
        None => None,
    };
    let (slow, failing) = (read(&options.slow)?, read(&options.failing)?);
    let templates = [Some(&template), slow.as_ref(), failing.as_ref()];
    let is_number = templates.into_iter().flatten().any(|template| template.is_number);
    let receiver = |command| Receiver::new(command, log, target.clone());
    Ok(Judge {
        ids: Ids::new(is_number),
        receiver: options.start.clone().map(receiver),
        target,
        template,
        slow,
        failing,
        signer,
        counter,
        patience: options.patience,
        first_effect: Cell::default(),
        settled: RefCell::default(),
    })
}
