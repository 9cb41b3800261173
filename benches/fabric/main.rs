//! Puts between two ranks that are processes of this machine: latency of 8 bytes, and bandwidth.
//!
//! Latency is half of the time that a put needs there and back; each pair arms, puts and waits, as a program
//! does. Bandwidth counts the bytes of a window of puts in one direction, until the target says that it has
//! them all. Both are medians over batches. Compare only what was measured in one run.
//!
//! `--chain N` measures instead a broadcast to the others of a chain (chain.rs); `ci/cables bench` does that on a
//! chain of network namespaces whose cables are limited in rate.

mod chain;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use fulmen::fabric::rendezvous::{AtRankZero, Secret};
use fulmen::fabric::shm::{Supervisor, connect_from_env};
use fulmen::fabric::{Buf, Fabric, Lane, tcp};
use fulmen::{Error, Result};
use fulmen_kernels::{Team, allowed_cores};
use serde_json::{Value, json};

/// Latency and bandwidth of puts between two processes.
#[derive(Clone, Parser)]
struct Args {
    /// Transports to measure
    #[arg(long, value_delimiter = ',', default_values = ["shm", "tcp"])]
    fabric: Vec<Transport>,
    /// Batches of each case; the median counts
    #[arg(long, default_value_t = 7)]
    batches: usize,
    /// TCP connections between the ranks
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Puts of this many bytes; 8 are always measured
    #[arg(long, value_delimiter = ',', default_values_t = SIZES)]
    bytes: Vec<usize>,
    /// TCP with checksums or without; by itself those on one host do without
    #[arg(long)]
    checksums: Option<bool>,
    /// Instead: a broadcast along a chain of so many ranks, of which only neighbours are connected
    #[arg(long)]
    chain: Option<usize>,
    /// MiB of that broadcast
    #[arg(long, default_value_t = 32)]
    mib: usize,
    /// What starts rank {} of the chain, as `ip netns exec host{}`
    #[arg(long, default_value = "")]
    enter: String,
    /// Where the chain's ranks meet; a free port of loopback if not given
    #[arg(long)]
    meet: Option<String>,
    /// Subnets that carry data
    #[arg(long, value_delimiter = ',')]
    on: Vec<String>,
    /// Also write the figures here
    #[arg(long)]
    json: Option<PathBuf>,
    /// This process is a rank: the rendezvous of rank 0 (`-`: none), this rank, and where to leave figures
    #[arg(long, hide = true, num_args = 3)]
    as_rank: Option<Vec<String>>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Transport {
    Shm,
    Tcp,
}

const SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// Puts under way at a time.
const WINDOW: usize = 4;

fn main() {
    let args = Args::parse();
    let end = match &args.as_rank {
        Some(place) => rank(&args, place),
        None => parent(&args),
    };
    if let Err(e) = end {
        eprintln!("fabric-bench: {e}");
        std::process::exit(e.exit_code().into());
    }
}

fn system(what: &str) -> impl Fn(std::io::Error) -> Error {
    move |e| Error::System { what: what.into(), os: e.to_string() }
}

// ---- ranks ----

fn rank(args: &Args, place: &[String]) -> Result<()> {
    let (address, me, figures) = (&place[0], place[1].parse().unwrap_or(0), Path::new(&place[2]));
    let fabric = match connect_from_env()? {
        Some(fabric) => fabric,
        None => over_tcp(args, address, me)?,
    };
    let _here = place_on_a_core(&*fabric)?;
    let measured = match args.chain {
        Some(_) => chain::measure(&fabric, args.mib << 20, args.batches),
        None => measure(&*fabric, args),
    };
    let measured = measured.inspect_err(|e| fabric.fail(e))?;
    if fabric.rank() == 0 {
        std::fs::write(figures, measured.to_string()).map_err(system("the figures"))?;
    }
    Ok(())
}

/// Where each rank can have one, it keeps to a core, as the ranks of `mpirun --bind-to core` do.
fn place_on_a_core(fabric: &dyn Fabric) -> Result<Option<Team>> {
    let cores = allowed_cores();
    if cores.len() < fabric.size() {
        return Ok(None);
    }
    let team =
        Team::bound(&[cores[fabric.rank()]]).map_err(|e| Error::Internal(format!("a team of one: {e}")))?;
    Ok(Some(team))
}

fn over_tcp(args: &Args, address: &str, me: usize) -> Result<Arc<dyn Fabric>> {
    let mut bytes = [0; 32];
    std::io::stdin().read_exact(&mut bytes).map_err(system("the secret"))?;
    let (secret, limit) = (Secret::from_bytes(bytes), Duration::from_secs(30));
    let size = args.chain.unwrap_or(2);
    let mut rendezvous = if me == 0 {
        let listener = TcpListener::bind(address).map_err(system("the rendezvous"))?;
        AtRankZero::host(listener, size, &secret, limit)?
    } else {
        let address = address.parse().map_err(|e| Error::Internal(format!("{address}: {e}")))?;
        AtRankZero::join(&[address], me, size, &secret, limit)?
    };
    let neighbours = |size: usize| (0..size).map(|a| (0..a).map(|b| a - b == 1).collect()).collect();
    let options = tcp::Options {
        connections: args.connections,
        checksums: args.checksums,
        on: args.on.iter().map(|on| on.parse()).collect::<Result<_>>()?,
        // In namespaces the cables decide.
        reach: args.chain.filter(|_| args.enter.is_empty()).map(neighbours),
        ..tcp::Options::default()
    };
    tcp::connect(&mut rendezvous, secret, &options)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(fabric: &dyn Fabric, args: &Args) -> Result<Value> {
    let latency = latency(fabric, args.batches)?;
    let mut bandwidth = Vec::new();
    for &len in args.bytes.iter().filter(|len| **len > 8) {
        bandwidth.push(json!({ "bytes": len, "gbyte_per_s": stream(fabric, len, args.batches)? }));
    }
    let link = fabric.link(1 - fabric.rank());
    Ok(json!({ "fabric": fabric.name(), "link": link, "latency_us": latency, "bandwidth": bandwidth }))
}

/// Half a round trip of 8 bytes, in microseconds.
fn latency(fabric: &dyn Fabric, batches: usize) -> Result<f64> {
    const ROUNDS: usize = 5000;
    let (me, other) = (fabric.rank(), 1 - fabric.rank());
    let mut out = Buf::<u64>::zeros(fabric, 1)?;
    let mut inn = Buf::<u64>::zeros(fabric, 1)?;
    let mut times = Vec::new();
    for batch in 0..batches + 1 {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            inn.arm(fabric, Lane::CONTROL, other, 0..1)?;
            if me == 1 {
                inn.wait(fabric, Lane::CONTROL, other)?;
            }
            out.flush(fabric)?;
            out.put(fabric, Lane::CONTROL, other, 0..1)?;
            if me == 0 {
                inn.wait(fabric, Lane::CONTROL, other)?;
            }
        }
        if batch > 0 {
            times.push(start.elapsed().as_secs_f64() / ROUNDS as f64 / 2.0 * 1e6);
        }
    }
    Ok(median(times))
}

/// Puts of `len` bytes from rank 0 to rank 1, in 10⁹ bytes a second.
fn stream(fabric: &dyn Fabric, len: usize, batches: usize) -> Result<f64> {
    let puts = ((256 << 20) / len).clamp(WINDOW, 1000);
    let mut buf = Buf::<u8>::zeros(fabric, len * WINDOW)?;
    let mut word = Buf::<u64>::zeros(fabric, 2)?;
    let range = |i: usize| (i % WINDOW) * len..(i % WINDOW + 1) * len;
    buf.write(0..len * WINDOW).fill(1 + fabric.rank() as u8);
    let mut times = Vec::new();
    for batch in 0..batches + 1 {
        let start = Instant::now();
        if fabric.rank() == 0 {
            word.arm(fabric, Lane::CONTROL, 1, 0..1)?;
            for i in 0..puts {
                if i >= WINDOW && i % WINDOW == 0 {
                    buf.flush(fabric)?;
                }
                buf.put(fabric, Lane::PANEL, 1, range(i))?;
            }
            buf.flush(fabric)?;
            word.wait(fabric, Lane::CONTROL, 1)?;
        } else {
            for i in 0..WINDOW {
                buf.arm(fabric, Lane::PANEL, 0, range(i))?;
            }
            for i in 0..puts {
                buf.wait(fabric, Lane::PANEL, 0)?;
                if i + WINDOW < puts {
                    buf.arm(fabric, Lane::PANEL, 0, range(i))?;
                }
            }
            word.put(fabric, Lane::CONTROL, 0, 1..2)?;
            word.flush(fabric)?;
        }
        if batch > 0 {
            times.push((puts * len) as f64 / start.elapsed().as_secs_f64() * 1e-9);
        }
    }
    Ok(median(times))
}

// ---- the parent ----

fn again(place: [&str; 2], figures: &Path) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().map_err(system("this program"))?);
    command.args(std::env::args().skip(1)).arg("--as-rank").args(place).arg(figures);
    Ok(command)
}

fn run_shm(args: &Args, figures: &Path) -> Result<()> {
    let largest = args.bytes.iter().copied().max().unwrap_or(0);
    let command = |rank: usize| again(["-", &rank.to_string()], figures);
    let mut commands = [Some(command(0)?), Some(command(1)?)];
    let supervisor = Supervisor::new(2, |rank| {
        commands[rank].take().unwrap_or_else(|| Command::new("false")) // asked for once
    });
    let outcome = supervisor.segment_bytes(WINDOW * largest + (64 << 20)).run()?;
    match outcome.message {
        Some(message) => Err(Error::Ended { message, code: outcome.exit_code }),
        None => Ok(()),
    }
}

fn run_tcp(args: &Args, figures: &Path) -> Result<()> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(system("a port"))?;
    let meet = args.meet.clone().unwrap_or_else(|| free.to_string());
    let secret = Secret::random()?;
    let mut children = Vec::new();
    for rank in 0..args.chain.unwrap_or(2) {
        let own = again([&meet, &rank.to_string()], figures)?;
        let enter = args.enter.replace("{}", &rank.to_string());
        let mut words = enter.split_whitespace();
        let mut command = match words.next() {
            None => own,
            Some(program) => {
                let mut command = Command::new(program);
                command.args(words).arg(own.get_program()).args(own.get_args());
                command
            }
        };
        let mut child = command.stdin(Stdio::piped()).spawn().map_err(system("a rank"))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(secret.expose()).map_err(system("a rank's stdin"))?;
        }
        children.push(child);
    }
    for mut child in children {
        let status = child.wait().map_err(system("a rank"))?;
        if !status.success() {
            let code = status.code().unwrap_or(4) as u8;
            return Err(Error::Ended { message: format!("a rank ended with {status}"), code });
        }
    }
    Ok(())
}

fn parent(args: &Args) -> Result<()> {
    let figures = std::env::temp_dir().join(format!("fabric-bench-{}.json", std::process::id()));
    if let Some(ranks) = args.chain {
        return parent_of_chain(args, ranks, &figures);
    }
    let mut all = Vec::new();
    println!("{:<8}{:>14}   GB/s by bytes of a put", "fabric", "8 B put, us");
    let sizes: String = args
        .bytes
        .iter()
        .filter(|len| **len > 8)
        .map(|len| format!("{:>10}", format!("{} KiB", len >> 10)))
        .collect();
    println!("{:<22}{sizes}", "");
    for transport in &args.fabric {
        match transport {
            Transport::Shm => run_shm(args, &figures)?,
            Transport::Tcp => run_tcp(args, &figures)?,
        }
        let value = figures_in(&figures)?;
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let rates: String = (value["bandwidth"].as_array().into_iter().flatten())
            .map(|b| format!("{:>10.2}", number(&b["gbyte_per_s"])))
            .collect();
        let name = value["fabric"].as_str().unwrap_or("?");
        println!("{name:<8}{:>14.2}{rates}   {}", number(&value["latency_us"]), value["link"]);
        all.push(value);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, Value::Array(all).to_string()).map_err(system("the JSON file"))?;
    }
    Ok(())
}

/// What a rank has left in this file, which is removed.
fn figures_in(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(system("the figures"))?;
    std::fs::remove_file(path).map_err(system("the figures"))?;
    serde_json::from_str(&text).map_err(|e| Error::Internal(format!("the figures: {e}")))
}

fn parent_of_chain(args: &Args, ranks: usize, figures: &Path) -> Result<()> {
    run_tcp(args, figures)?;
    let value = figures_in(figures)?;
    let number = |name: &str| value[name].as_f64().unwrap_or(f64::NAN);
    println!(
        "{} MiB along a chain of {ranks}: {:.1} ms to all, {:.1} ms to its other end, {:.1} ms over the first cable; \
         ratio {:.2}",
        args.mib,
        number("broadcast_ms"),
        number("far_ms"),
        number("one_link_ms"),
        number("ratio")
    );
    for link in value["links"].as_array().into_iter().flatten() {
        println!("  {}", link.as_str().unwrap_or("?"));
    }
    match &args.json {
        Some(path) => std::fs::write(path, value.to_string()).map_err(system("the JSON file")),
        None => Ok(()),
    }
}
