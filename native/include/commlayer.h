/*
 * commlayer native engine: the one public header.
 *
 * An engine is the communication thread of a process, with its peers and its wire. A group is a communicator (a torch
 * process group) that runs plans on an engine. A plan is data: the steps by which one rank sends, receives and adds, in
 * their order. Python builds plans and submits them; from there to the completion no Python runs.
 *
 * Rules that hold for every function:
 *  - return codes are 0 or a negative enum cl_error; errno is never returned and nothing aborts;
 *  - buffers belong to the caller, and are used by the engine from submit to completion;
 *  - every call is thread-safe except *_close, which must be the last call on its object;
 *  - lengths and offsets are bytes, times are microseconds unless the name says otherwise.
 *
 * The text between the CFFI markers is the whole binding: native/build.py hands it to cffi as it stands, so it must
 * stay free of preprocessor lines.
 */
#ifndef COMMLAYER_H
#define COMMLAYER_H

#include <stddef.h>
#include <stdint.h>

#define CL_LOSS_BOUND_MAX 0.5 /* no loss bound is larger */

/* CFFI-BEGIN */
enum cl_error {
    CL_OK = 0,
    CL_EINVAL = -1,    /* an argument is out of range */
    CL_ENOMEM = -2,    /* no memory */
    CL_ESYSTEM = -3,   /* the operating system refused a call the engine cannot do without */
    CL_ETIMEDOUT = -4, /* the operation did not end within its timeout */
    CL_EPEERLOST = -5, /* a peer died or stopped answering */
    CL_EABORTED = -6,  /* the group was aborted, here or by a peer */
    CL_ECLOSED = -7,   /* the engine or group is closed */
    CL_EMISMATCH = -8, /* ranks disagree on what they are doing */
    CL_EAGAIN = -9,    /* nothing there yet */

    CL_ENOLIBFABRIC = -20, /* libfabric is not there, or its headers were not when this was built */
    CL_ENODEVICE = -21,    /* the provider has no datagram endpoint at this address */
    CL_ENOPORT = -22,      /* every UDP port of the range is taken */
};

enum cl_dtype {
    CL_U8 = 0,
    CL_I8 = 1,
    CL_I16 = 2,
    CL_I32 = 3,
    CL_I64 = 4,
    CL_F16 = 5,
    CL_BF16 = 6,
    CL_F32 = 7,
    CL_F64 = 8,
    CL_U16 = 9,
    CL_U32 = 10,
    CL_U64 = 11,
};

/* How packets prove that they are of this job; the same on every rank. */
enum cl_auth {
    CL_AUTH_HEADER = 0, /* a keyed tag over the header and over everything but the payload of DATA packets */
    CL_AUTH_FULL = 1,   /* over the payload, too */
    CL_AUTH_OFF = 2,    /* packets carry the job's number, in plain sight */
};

/* AVG travels as SUM; the plan's SCALE steps divide by the number of ranks. The bitwise ones are for integers. */
enum cl_op {
    CL_SUM = 0,
    CL_PRODUCT = 1,
    CL_MIN = 2,
    CL_MAX = 3,
    CL_BAND = 4,
    CL_BOR = 5,
    CL_BXOR = 6,
};

enum cl_step_kind {
    CL_SEND = 0,        /* source range -> peer, over the network */
    CL_RECV_COPY = 1,   /* target = what the peer sent over the network */
    CL_RECV_REDUCE = 2, /* target = target (op) what the peer sent over the network, in order of arrival */
    CL_COPY = 3,        /* target = source, within memory this process can address; with a codec: decoded */
    CL_REDUCE = 4,      /* target = target (op) source, likewise */
    CL_SCALE = 5,       /* target = target / peer, where the field `peer` holds the divisor (AVG) */
    CL_POST = 6,        /* raise this rank's host counter to `message` (counted from the start of the operation) */
    CL_AWAIT = 7,       /* waits until the host counter of `peer` is at least `message` */
    CL_ENCODE = 8,      /* target = source, encoded */
    CL_TELL = 9,        /* the number source_offset, into this rank's staging at target_offset: 8 bytes */
    CL_CHECK = 10,      /* fails with CL_EMISMATCH unless the staging of `peer` has, at source_offset, the number
                         * target_offset */
};

enum cl_buffer {
    CL_INPUT = 0,
    CL_OUTPUT = 1,  /* the same memory as CL_INPUT for in-place collectives */
    CL_SCRATCH = 2, /* private to the operation, contents undefined at the start */
    CL_STAGING = 3, /* the staging memory of rank `peer`, mapped by every rank of its host */
};

/* The upper byte of a step's flags is 0, or a codec: 1 + enum cl_codec_kind. Its step works on float32 values that are,
 * or are to be, encoded in blocks; offsets of encoded memory count encoded bytes, `length` those of the values. */
enum cl_step_flags {
    CL_STEP_PARTIAL =
        1, /* the message may lose packets, up to the loss bound of the operation; for SEND and its RECV */
    /* Leaves in CL_INPUT what the sum lacks. ENCODE: there, at its source_offset, the error of the encoded values is
     * left, times `factor`. SEND of encoded values, with CL_FEEDBACK: lost values are added at its
     * target_offset. */
    CL_STEP_KEEP = 2,
};

/* One step of a plan. A step is ready when `dependencies` other steps that name it as successor are done. */
struct cl_step {
    uint16_t kind;            /* enum cl_step_kind */
    uint16_t flags;           /* enum cl_step_flags */
    uint32_t peer;            /* group rank; for CL_SCALE the divisor; for CL_STAGING the rank that owns the staging */
    uint32_t source;          /* enum cl_buffer */
    uint32_t target;          /* enum cl_buffer */
    uint64_t source_offset;   /* bytes */
    uint64_t target_offset;   /* bytes; SEND of encoded values: their offset in CL_INPUT */
    uint64_t length;          /* bytes */
    uint32_t message;         /* SEND/RECV: the n-th message from sender to receiver in this plan; POST/AWAIT: value;
                               * SCALE: the number of ranks that each possibly missing contribution sums up (0: one) */
    uint32_t dependencies;    /* how many steps must end first */
    uint32_t successor_first; /* this step's slice of the plan's successor array */
    uint32_t successor_count;
    uint32_t block;  /* number of the first block for a codec, the same at encoder and decoders */
    uint32_t factor; /* ENCODE with CL_STEP_KEEP: multiplies the error */
};

struct cl_range {
    uint64_t start;
    uint64_t end; /* one past the last */
};

/* The treatment of contributions to a reduction that did not arrive. */
enum cl_treatment {
    CL_FEEDBACK = 0, /* they count as zero; their makers learn of it (cl_operation_missing) and can add them later */
    CL_RESCALE = 1,  /* SUM only: range by range, the sum of those that arrived times ranks / their number */
    CL_ZERO = 2,     /* they count as zero */
};

/* How the values of an encoded message lie in it. All zero: the message is not encoded. */
struct cl_blocks {
    uint32_t encoded_bytes; /* length of an encoded block; packets hold whole blocks */
    uint32_t value_bytes;   /* length of the same block before it was encoded */
    uint64_t length;        /* length of all values */
};

/* The quality of service of a transfer. All zero: reliable, most urgent. The ranks must agree. */
struct cl_qos {
    uint8_t priority;     /* 0 (first) to 7; 8: it yields to other traffic */
    uint8_t treatment;    /* enum cl_treatment */
    uint16_t order;       /* place in its class, which sends the smallest first; equal: first in, first out */
    double loss_bound;    /* share of a message's packets that may be missing at its end, 0 to CL_LOSS_BOUND_MAX */
    uint64_t deadline_us; /* later than that, a message within its loss bound ends if packets stall; 0: none */
    /* Protected packets, which may not be lost: the first protect_first and last protect_last packets of each message,
     * and packets with a byte whose bit in `protect` is set. Bit o / protect_bytes is that of the byte at offset o of
     * the map's range, in which the message (for an operation: CL_INPUT) begins at protect_offset. The map belongs to
     * the engine like a buffer. */
    uint32_t protect_first, protect_last;
    const uint64_t *protect; /* may be NULL */
    uint64_t protect_bytes, protect_offset;
    struct cl_blocks blocks; /* set by the engine; protect_offset is then that of the values */
};

typedef struct cl_plan cl_plan;
typedef struct cl_engine cl_engine;
typedef struct cl_group cl_group;
typedef struct cl_operation cl_operation;

/* One short sentence for a code; never NULL. */
const char *cl_error_text(int code);

/* ---- plans ---- */

struct cl_plan_options {
    const struct cl_step *steps;
    uint32_t step_count;
    const uint32_t *successors; /* those of all steps: each step has a slice, see struct cl_step */
    uint32_t successor_count;
    uint32_t rank, world_size;
    uint64_t input_bytes, output_bytes, scratch_bytes, staging_bytes;
    /* Names the collective to which the plan belongs: ranks that call the same collective pass the same number, and
     * others another one; 0: unknown. Ranks whose operations differ in it, in dtype or in op get CL_EMISMATCH, in this
     * operation or in the next. */
    uint32_t signature;
};
/* Copies and checks a plan: kinds, buffers, peers < world_size, successors in range, no cycle, posts. */
int cl_plan_create(const struct cl_plan_options *options, cl_plan **plan);
/* Releases the caller's reference. Operations in flight keep their plan alive. */
void cl_plan_release(cl_plan *plan);

/* ---- interfaces ---- */

struct cl_interface {
    char name[16];
    char address[48]; /* numeric */
    uint32_t prefix_bits;
    uint32_t mtu;
    int32_t is_loopback;
    int32_t is_ipv6;
    int32_t is_running; /* has a carrier */
};
/* Fills in up to `capacity` interfaces that are up and have an address; returns their number, or a negative error. */
int cl_interfaces(struct cl_interface *out, uint32_t capacity);

/* ---- engine ---- */

struct cl_wire_type;
struct cl_engine_options {
    const char *wire;                     /* "udp", "ofi" or "none" (shared memory only) */
    const struct cl_wire_type *wire_type; /* a wire of the caller's own, instead of `wire`: see wire/wire.h; or NULL */
    const char *const *addresses;         /* numeric local addresses, one socket each, at most 8 different ones:
                                             sockets of one address share its interface, but are separate paths */
    uint32_t address_count;               /* at most 64 */
    uint32_t datagram_bytes;              /* largest UDP payload, header included */
    uint64_t unexpected_limit_bytes;      /* limit of the memory for packets that come before their operation */
    uint64_t peer_timeout_us;             /* a peer is lost after so much silence and up to a tenth more */
    uint32_t auth;                        /* enum cl_auth */
    uint32_t dscp;                  /* udp: not 0: DSCP by priority, and ECN-capable unless a packet may be lost */
    const char *ofi_provider;       /* ofi: name of libfabric's provider; NULL or empty: its first */
    uint32_t port_first, port_last; /* udp: each socket gets the first free port of this range; 0: the kernel chooses */
    uint64_t credit_bytes;          /* that peers may have on their way to this host, of what waits for credit; 0: no
                                     * credit */
};
enum { CL_CREDIT_DERIVED = 1 }; /* as credit_bytes: from the links' rates and round trips */

int cl_engine_open(const struct cl_engine_options *options, cl_engine **engine);
/* Aborts operations in flight, lingers briefly for peers that still need acknowledgements, and joins the thread. */
void cl_engine_close(cl_engine *engine);
/* Waits briefly until no peer needs an acknowledgement any more: for a process that ends without closing. */
void cl_engine_linger(cl_engine *engine);
/* UDP port of the n-th address. */
int cl_engine_port(cl_engine *engine, uint32_t index, uint32_t *port);
/* Opens the n-th port at another numeric address of this host, whose interface came back with it. Peers must learn of
 * it: cl_engine_port, cl_engine_add_peer. CL_EINVAL: the wire cannot, or the address is of another family. */
int cl_engine_move_port(cl_engine *engine, uint32_t index, const char *address);
/* The descriptor of the n-th address's socket, for reading its options, or a negative error. The engine owns it. */
int cl_engine_descriptor(cl_engine *engine, uint32_t index);
/* The remote address that peers must pass to cl_engine_add_peer for the n-th port of this process: that of libfabric
 * (ofi), as text of at most CL_ADDRESS_BYTES; empty if it is the numeric address itself. */
enum { CL_ADDRESS_BYTES = 256 };
int cl_engine_address(cl_engine *engine, uint32_t index, char *text);
/* Payload bytes of a full packet to a peer that can take as much. */
uint32_t cl_engine_packet_bytes(cl_engine *engine);
/* Names this process within its job. `key`: 16 bytes, the secret that the ranks of the job share. It must be called
 * before the first group; calling it again with the same values is accepted. */
int cl_engine_identify(cl_engine *engine, uint64_t job, const uint8_t *key, uint16_t self, uint16_t epoch);
/* A peer and the paths to it: path i goes from local address local[i] to the remote address and port. */
struct cl_peer_options {
    uint16_t peer;
    uint32_t path_count;
    const uint32_t *local;
    const char *const *remote_addresses;
    const uint32_t *remote_ports;
    /* Payload bytes of a full packet between the two, the same at both, at most cl_engine_packet_bytes of either; 0:
     * this engine's cl_engine_packet_bytes. */
    uint32_t packet_bytes;
    const uint8_t *key; /* 16 bytes, known to the two alone; NULL: they use the job's key */
    uint32_t grants;    /* not 0: it has credit_bytes, so what goes to it waits for the credit that it grants */
};
/* Makes a peer reachable. Adding a known peer again lets its paths lead to other remote addresses (udp), and changes
 * nothing else; an error changes nothing. */
enum { CL_PEERS_MAX = 65535 }; /* peers have lower numbers */
int cl_engine_add_peer(cl_engine *engine, const struct cl_peer_options *options);
/* Sends a PING over each path to a peer, to learn whether it answers: see is_answered of struct cl_path_stats. */
int cl_engine_ping(cl_engine *engine, uint16_t peer);
/* Pauses a path to a peer, by its number: data takes it only while no other path lives. Acknowledgements and probes of
 * the peer go on. CL_EINVAL for an unknown peer or path. */
int cl_engine_pause(cl_engine *engine, uint16_t peer, uint32_t path, int paused);
/* The incarnation of a peer: how often the two processes have begun anew, after either had lost the other. Returns
 * CL_OK with a peer that lives, CL_EPEERLOST with one that is lost in this incarnation, and CL_EINVAL with an unknown
 * one. */
int cl_engine_incarnation(cl_engine *engine, uint16_t peer, uint32_t *incarnation);
/* Begins an incarnation of a peer, as the peer does at its end: a lost peer lives again. Operations that still exchange
 * messages with it fail with CL_EPEERLOST. An incarnation that has begun before changes nothing. */
int cl_engine_revive_peer(cl_engine *engine, uint16_t peer, uint32_t incarnation);
/* Watches the process of a peer on this host: the peer is lost when the process dies. */
int cl_engine_watch_process(cl_engine *engine, uint16_t peer, int32_t pid);
/* The descriptor of this process's meter, which tells the bytes that it has sent. The engine owns it. -1: the system
 * gives no memory for it. */
int cl_engine_meter(cl_engine *engine);
/* Reads the meter of a watched peer from now on, a descriptor of its process: the processes of a host share its
 * interfaces by their meters. CL_EINVAL for a peer that is not watched; CL_ESYSTEM: its process has no such meter. Of a
 * process that has died there is nothing to read, which is CL_OK. */
int cl_engine_read_meter(cl_engine *engine, uint16_t peer, int32_t fd);

struct cl_engine_stats {
    uint64_t packets_sent, packets_received, payload_bytes_sent, payload_bytes_received;
    uint64_t packets_retransmitted, packets_lost, packets_spurious, packets_duplicate;
    /* dropped without effect: foreign (wrong magic, version, job, epoch, source, path or place), with a wrong tag, or
     * seen before */
    uint64_t packets_foreign, packets_forged, packets_replayed;
    uint64_t packets_unexpected, packets_unexpected_dropped, acks_sent, acks_received, probes_sent;
    uint64_t grants_sent; /* credit that this process gave to senders; 0 without credit_bytes */
    uint64_t operations_done, operations_failed, wakeups, send_calls, receive_calls; /* 0 in an endpoint's own */
    uint64_t packets_given_up; /* lost, within the loss budget of their message, and not sent again */
    uint64_t packets_late;     /* came after the receiver had ended their message without them */
    uint64_t messages_stopped; /* receives that ended without some of their packets */
    /* packets_retransmitted by reason: the packet was declared lost, the receiver had no room for it, a probe timeout
     * sent it once more in case it was lost, or a pause did (protocol/repeat.h). Their sum is packets_retransmitted. */
    uint64_t retransmitted_lost, retransmitted_refused, retransmitted_probes, retransmitted_early;
    uint64_t shared_bytes_received; /* read from memory that other ranks of this host wrote */
    uint64_t packets_overflowed;    /* udp: dropped by this host's kernel, because a socket's buffer was full */
};
int cl_engine_read_stats(cl_engine *engine, struct cl_engine_stats *stats);

struct cl_path_stats {
    uint64_t packets_sent, packets_lost, packets_received; /* acknowledgements are not counted */
    uint64_t window_bytes;                                 /* that may be in flight */
    uint32_t round_trip_us;                                /* smoothed */
    uint32_t queue_us;    /* the part of it in queues beyond this host's interface; smoothed */
    uint32_t port;        /* number of the local address the path leaves from */
    uint32_t is_dead;     /* another path delivers and this one does not: it gets probes only */
    uint32_t is_answered; /* the peer has acknowledged a packet: the path has worked, both ways */
    uint64_t rate_bytes;  /* bytes per second at which packets may leave; 0: only the window limits them */
    uint32_t deaths;      /* how often the path died; it came back as often, but for is_dead */
    uint64_t heard_us;    /* when a packet of the peer, acknowledgements included, last came over it (CLOCK_MONOTONIC);
                           * 0: never */
    uint32_t datagram_bytes; /* larger packets leave in fragments: the path carries none larger */
    /* Bytes per second that the interface of the path carries for this process, as measured, and the bytes that this
     * process has sent through it, with headers. */
    uint64_t capacity_bytes, carried_bytes;
    /* Bytes per second of the interface in its fastest moments of lately: at which peers have acknowledged data that
     * left through it, and at which data came in. 0: unknown. */
    uint64_t delivered_bytes, arrived_bytes;
};
/* Fills in up to `capacity` paths to a peer; returns their number, or CL_EINVAL for an unknown peer. */
int cl_engine_read_paths(cl_engine *engine, uint16_t peer, struct cl_path_stats *paths, uint32_t capacity);

/* ---- shared memory of the ranks of one host ---- */

/* Creates a region of shared memory for `ranks` ranks; it is anonymous and vanishes with its last user. The other ranks
 * open its descriptor *fd as /proc/PID/fd/FD. */
int cl_host_create(uint32_t ranks, uint64_t staging_bytes, int32_t *fd);
int cl_host_open(int32_t pid, int32_t fd, int32_t *own_fd);
void cl_host_close_fd(int32_t fd);

/* ---- groups ---- */

struct cl_group_options {
    uint32_t id; /* the same on every rank, unique within the job; below 2^31 */
    uint32_t rank;
    uint32_t size;
    const uint16_t *peers;  /* job-wide peer id of each rank */
    const uint32_t *local;  /* group ranks that share this host's memory, ascending, this rank included */
    uint32_t local_count;   /* 1: no shared memory */
    int32_t host_fd;        /* from cl_host_create or cl_host_open; -1 when local_count is 1; not consumed */
    uint64_t staging_bytes; /* as given to cl_host_create: staging per rank and operation */
    uint32_t spin_us;       /* longest spin before a blocked wait sleeps; 0 when ranks outnumber cores */
    const char *bells;      /* one name per local rank, of 32 characters each: cl_engine_bell */
};
int cl_group_open(cl_engine *engine, const struct cl_group_options *options, cl_group **group);
/* Fails operations in flight with CL_ECLOSED and frees the group. */
void cl_group_close(cl_group *group);
/* Fails every operation of the group, here with `reason` and on the peers with CL_EABORTED. */
void cl_group_abort(cl_group *group, int reason);
/* 0, or the error that made the group unusable; *peer is the rank of the culprit if known, else UINT32_MAX. */
int cl_group_status(cl_group *group, uint32_t *peer);
/* The lag of a rank, as the collectives of this rank have seen it. Its data is the last of all when its first data in
 * an operation came after that of every other rank, and after this rank began to run the operation. */
struct cl_lag {
    uint64_t last;      /* operations in which its data was the last */
    uint64_t waited_us; /* time from the start of these operations until that data came */
};
/* Fills in the lags of the first `capacity` ranks; returns the number of ranks. */
int cl_group_read_lags(cl_group *group, struct cl_lag *lags, uint32_t capacity);
/* Sets awaited[rank] to 1 for each rank that the group's collectives in flight wait for, and to 0 for the others: a
 * rank that is busy with an earlier operation, and whose data no collective in flight needs, is not awaited. */
int cl_group_awaited(cl_group *group, uint8_t *awaited);
/* CL_EMISMATCH: rank *peer of this host runs an operation in class *theirs, this rank in class *own. Else CL_OK. */
int cl_group_classes(cl_group *group, uint32_t *peer, uint32_t *own, uint32_t *theirs);
/* Whether a rank of this host has closed the group: 1, or 0, also for ranks of other hosts. */
int cl_group_left(cl_group *group, uint32_t rank);
/* Name by which peers wake this engine: 31 characters and a NUL. */
int cl_engine_bell(cl_engine *engine, char *name);

/* ---- operations ---- */

/* What cl_submit and cl_run are asked for. */
struct cl_operation_request {
    cl_plan *plan;
    void *input, *output; /* belong to the engine until the operation is done */
    uint64_t timeout_us;  /* 0: none */
    int32_t dtype, op;    /* enum cl_dtype, enum cl_op; plans with a codec: CL_F32, CL_SUM */
    /* With a loss bound, the steps marked CL_STEP_PARTIAL may lose packets: of sums of floating-point numbers only,
     * else CL_EINVAL. Its deadline_us counts from the start of the operation; UINT64_MAX: it follows the plan's latest
     * runs. */
    struct cl_qos qos;
    uint64_t codec_key; /* chooses the rotations of the plan's codecs; the same on all ranks */
    /* Words of a device, or NULL; not for cl_run. They must live until the operation is done, `gate` until it is
     * written. gate: the operation starts when it is not 0, and those submitted after it wait behind it, but for
     * receives. The time of timeout_us begins then. done: 1 is written at the end, after all of `output`. If the
     * operation fails, the bytes of `output` are 0xFF first, which is NaN in all types of floating-point numbers. An
     * operation whose group fails ends when its gate opens, so that no copy of the device follows; at cl_group_close at
     * once. */
    const uint32_t *gate;
    uint32_t *done;
};

/* Starts a plan. */
int cl_submit(cl_group *group, const struct cl_operation_request *request, cl_operation **operation);
/* The same and waits; runs in the calling thread when only shared memory is needed. Returns the operation's status. */
int cl_run(cl_group *group, const struct cl_operation_request *request);
/* The ranges of CL_INPUT that were not counted, in order, once it is done and well. Fills up to `capacity`, returns how
 * many there are, or CL_EAGAIN while the operation is in flight. */
int cl_operation_missing(cl_operation *operation, struct cl_range *ranges, uint32_t capacity);
/* Times of CLOCK_MONOTONIC. */
struct cl_operation_times {
    uint64_t submitted_us;
    uint64_t first_us; /* the first packet was sent or received, memory was first copied or shared; 0: neither */
    uint64_t ended_us;
};
/* Its times once it is done, well or not; CL_EAGAIN while it is in flight. */
int cl_operation_times(cl_operation *operation, struct cl_operation_times *times);
/* What cl_send and cl_receive are asked for. */
struct cl_message_request {
    uint32_t rank; /* the other one; cl_receive: UINT32_MAX is any source: the first message with this tag that comes */
    uint32_t tag;  /* below UINT32_MAX */
    void *memory;  /* belongs to the engine until the operation is done; cl_send only reads it */
    uint64_t length;
    uint32_t priority;    /* a send's class, 0 (first) to 7; 8: it yields to other traffic */
    uint64_t timeout_us;  /* 0: none */
    const uint32_t *gate; /* sends have one: see struct cl_operation_request */
    uint32_t *done;
};

/* Point-to-point, independent of and concurrent with the plans. Messages of one sender, receiver and tag are received
 * in the order in which they were sent; both sides must give the same length, which may be 0, else the group fails with
 * CL_EMISMATCH. A send of up to 64 KiB (within a host also at most a quarter of the ring) is done when it has been
 * copied, while the copies of the group take up to 1 MiB; another one when all of it is with the receiver's engine, or
 * in memory that the two ranks share. The first failure of one fails the group, also after it was done. cl_group_close
 * waits for the delivery of copies, 20 s at most. */
int cl_send(cl_group *group, const struct cl_message_request *request, cl_operation **operation);
int cl_receive(cl_group *group, const struct cl_message_request *request, cl_operation **operation);
/* The rank from which a receive got its message, once it has ended well; else returns its status. */
int cl_operation_source(cl_operation *operation, uint32_t *rank);

/* CL_EAGAIN while in flight, else the status. */
int cl_operation_status(cl_operation *operation);
/* Sleeps until done or timeout_us passed (0: no limit); CL_EAGAIN when it is still in flight. */
int cl_operation_wait(cl_operation *operation, uint64_t timeout_us);
/* Asks for a completion event. Returns CL_EAGAIN when the event will come, else the status: no event then. */
int cl_operation_notify(cl_operation *operation, uint64_t token);
void cl_operation_release(cl_operation *operation);

struct cl_event {
    uint64_t token;
    int32_t status;
};
/* Blocks up to timeout_us for completion events; returns how many, 0 after the timeout, CL_ECLOSED after
 * cl_engine_stop_events. */
int cl_engine_events(cl_engine *engine, struct cl_event *events, uint32_t capacity, uint64_t timeout_us);
void cl_engine_stop_events(cl_engine *engine);

/* ---- kernels, run in the calling thread ---- */

/* Encodes and decodes `count` float32 values as the engine does. `codec`: 1 + enum cl_codec_kind; CL_EINVAL for an
 * unknown one. `key` and `block`, the number of the first block, choose the rotations: those of a rank's messages have
 * the key cl_codec_key(codec_key, rank). With `add` the decoded values are added to `target`. */
int cl_encode(uint32_t codec, void *target, const float *source, uint64_t count, uint64_t key, uint64_t block);
int cl_decode(uint32_t codec, float *target, const void *source, uint64_t count, uint64_t key, uint64_t block,
              int32_t add);
/* The key of the blocks that a rank encodes, in an operation with this codec_key. */
uint64_t cl_codec_key(uint64_t codec_key, uint32_t rank);
/* Writes the indices, ascending, of the `k` values of largest magnitude, and these values. Of equal magnitudes those at
 * lower indices come first. All NaNs are equal and larger than infinity, so that an overflow shows in the selection.
 * CL_EINVAL unless k <= count < 2^32. A call needs 512 KiB of stack. */
int cl_select_largest(const float *values, uint64_t count, uint64_t k, uint32_t *indices, float *chosen);
/* Writes the code of the difference of `count` values to those at `base`, of value_bytes (1, 2, 4 or 8) each, and
 * returns its bytes. CL_EAGAIN: it has, or nearly has, more than `capacity` bytes. */
int64_t cl_difference_encode(const void *base, const void *values, uint64_t count, uint32_t value_bytes, void *code,
                             uint64_t capacity);
/* Turns `base`, at `values`, into the values whose difference was encoded; with `is_back`, those values into `base`.
 * Any bytes are safe. CL_EINVAL: these are no code of `count` such values; the memory has then no meaning. */
int cl_difference_apply(void *values, uint64_t count, uint32_t value_bytes, const void *code, uint64_t length,
                        int32_t is_back);
enum { CL_SUMS_CHUNK_BYTES = 65536, CL_SUMS_KEY_WORDS = 512 };
/* Two sums for each chunk of CL_SUMS_CHUNK_BYTES; `key`: CL_SUMS_KEY_WORDS random words. Of two different arrays of one
 * length, the chance over the keys that their sums are the same is about 2^-63. They are no protection against those
 * who know the key. */
void cl_sums(const void *memory, uint64_t length, const uint32_t *key, uint64_t *sums);
/* The float mode of the calling thread (MXCSR, FPCR). Kernels always compute in that of IEEE 754; the two functions are
 * for callbacks, which should compute in the mode of the thread that asked for them. */
uint64_t cl_float_mode_get(void);
void cl_float_mode_set(uint64_t mode);
/* The instruction set of the kernels that this process uses: "avx512", "avx2" or "scalar". */
const char *cl_kernels_level(void);
/* Uses the kernels of another one, for tests and measurements. CL_EINVAL: this CPU lacks it. */
int cl_kernels_select(const char *level);
/* CFFI-END */

#endif
