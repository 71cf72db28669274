/* C ABI of Hadron's models for foreign hosts: inference servers that keep their own scheduler, KV blocks, sampling and graphs.
 *
 * A host opens a model, lets it rehearse the largest steps, binds the memory of its KV cache, and then calls hadron_forward and
 * hadron_logits in each step. All arrays are memory of the host; each address comes with its size in bytes, which is checked.
 *
 * Calls with the same model must not overlap in time, and their launches (replays of captured graphs included) must follow each
 * other on the device: calls on different streams need an event between them. Different models are independent.
 */
#ifndef HADRON_H
#define HADRON_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface. A host compares it with hadron_abi_version() before any other call. */
#define HADRON_ABI_VERSION 2

/* Result of a call. The error text names the argument and has the numbers. */
enum hadron_status {
    HADRON_OK = 0,
    HADRON_REJECTED = 1, /* An argument or option is invalid or not supported; nothing was launched. */
    HADRON_FAILED = 2,   /* The device or another rank failed; close the model. */
    HADRON_BUG = 3       /* A panic, which did not cross the interface; close the model. */
};

enum hadron_dtype {
    HADRON_F32 = 0,
    HADRON_BF16 = 1,
    HADRON_F16 = 2,
    HADRON_F8_E4M3 = 3,
    HADRON_I32 = 4,
    HADRON_I64 = 5
};

/* Contiguous memory of the host: device memory if the model is on a GPU. Layers of the KV cache, block tables, output tokens, hidden
 * states and logits start at a multiple of 64 bytes; other arrays at a multiple of their element size. */
typedef struct hadron_array {
    uint64_t address;
    uint64_t bytes;
    uint32_t dtype; /* enum hadron_dtype */
    uint32_t reserved; /* 0 */
} hadron_array;

/* Communication of the host's ranks while a model with tensor parallelism is opened. */
typedef struct hadron_ranks {
    void *context; /* Passed to `all_gather`. */
    /* Gathers `bytes` bytes of each rank into `all`, in rank order: `size * bytes` bytes. Returns 0, or another number on failure.
     * Called by all ranks in the same order, by the thread that calls hadron_open. If hadron_open fails on one rank, the host ends the
     * calls of the others. */
    int32_t (*all_gather)(void *context, const void *own, uint64_t bytes, void *all);
    uint32_t rank;
    uint32_t size;
} hadron_ranks;

/* One step: a forward pass over rows of tokens. Row r has the tokens row_starts[r] .. row_starts[r + 1]. */
typedef struct hadron_step {
    uint32_t struct_bytes; /* sizeof(hadron_step) */
    /* 1: row r has exactly one token, with index r. Rows whose context length is 0 are padding, as in a captured graph of a fixed
     * batch size; `row_starts` is not read. 0: rows of any length. */
    uint32_t one_token_rows;
    uint64_t stream;           /* cudaStream_t or hipStream_t on which all launches run; may be capturing. Unused on a CPU. */
    hadron_array token_ids;    /* i32 or i64 [tokens] */
    hadron_array positions;    /* i32 or i64 [tokens] */
    hadron_array slots;        /* i64 [tokens]: block * block_tokens + offset; -1 = the key and value are not stored */
    hadron_array row_starts;   /* i32 [rows + 1] */
    hadron_array context_lens; /* i32 or i64 [rows]: keys of each row, including those of this step */
    hadron_array block_tables; /* i32 [rows, table_width] */
    /* i32 [outputs], indices below `tokens`: the tokens whose hidden states are computed. The last layer is faster for few of them. Not
     * read if `outputs` is 0: the hidden states of all tokens are computed. */
    hadron_array output_tokens;
    hadron_array hidden; /* Output: hidden states after the final norm, model dtype [outputs, hidden_size], or [tokens, hidden_size] */
    uint32_t tokens;
    uint32_t rows;
    uint32_t table_width;
    uint32_t decode_rows;     /* The first rows with one token each. */
    uint32_t max_query_len;   /* Upper bound of the tokens of a row. */
    uint32_t max_context_len; /* Upper bound of context_lens. */
    uint32_t outputs;         /* At most `rows`. */
    uint32_t reserved;        /* 0 */
} hadron_step;

/* Work of the device that a serving step must not do, counted since the model was opened. */
typedef struct hadron_counters {
    uint64_t allocations;      /* Device memory allocations. */
    uint64_t kernel_modules;   /* Loaded kernel modules. */
    uint64_t synchronizations; /* Waits of the host for the device. */
    uint64_t steps;            /* Completed calls of hadron_forward. */
} hadron_counters;

typedef struct hadron_model hadron_model;

/* Returns HADRON_ABI_VERSION of the library. */
uint32_t hadron_abi_version(void);

/* Returns the version of Hadron, a static string. */
const char *hadron_version(void);

/* Loads a model. `options` is a JSON object in UTF-8, `ranks` is null without tensor parallelism. Fields of `options`:
 *   model_dir       folder with config.json and safetensors files
 *   device          "cpu", "cuda" or "rocm"
 *   device_index    index among the visible GPUs (default 0)
 *   dtype           "float32", "bfloat16" or "float16"
 *   kv_cache_dtype  "auto" (that of the model) or "fp8"
 *   load_format     "safetensors" (default) or "synth": synthetic weights, computed from `seed`
 *   seed            default 0
 *   max_model_len   longest context
 *   max_num_tokens  most tokens of a step
 *   max_num_rows    most rows of a step
 *   block_tokens    tokens of a block of the KV cache, a multiple of 16 (default 16)
 *   capture_rows    row counts of the steps that the host captures as graphs (default none)
 *   threads         threads of a CPU, or threads that prepare weights (default: all cores; on a CPU, divided among the ranks)
 *   kernel_cache    folder of compiled GPU kernels (default none)
 *   library_folders folders in which the libraries of the GPU are searched (default: the system's)
 *   libraries       {"driver", "compiler", "blas", "collectives"}: paths that replace the search
 * Unknown fields are errors. Every call writes at most `room` bytes to `error`, a text that ends with nul. */
int32_t hadron_open(const char *options, uint64_t options_bytes, const hadron_ranks *ranks, hadron_model **model, char *error,
                    uint64_t room);

/* Writes facts about the model to `json`, an object that ends with nul:
 *   architecture, device, hidden_size, vocab_size, weight_bytes, heads (query heads of this rank)
 *   kv_layers: an array with one object per layer of the KV cache:
 *     {"kind": "heads", "kv_heads", "head_dim", "dtype"} or {"kind": "mla", "width", "dtype"} */
int32_t hadron_describe(hadron_model *model, char *json, uint64_t json_room, char *error, uint64_t room);

/* Compiles and tunes all kernels and allocates all memory of the steps that `hadron_open` allows, and of logits of up to max_num_rows
 * rows. Called before the host measures free memory. */
int32_t hadron_rehearse(hadron_model *model, char *error, uint64_t room);

/* Binds the memory of the KV cache: one array per layer, in the order of `kv_layers`. A later call replaces the earlier arrays.
 * Layout on GPUs: [blocks][kv_heads][K, V][block_tokens][head_dim], or [blocks][block_tokens][width] for MLA. Layout on a CPU: the
 * same bytes per block and head. */
int32_t hadron_bind_kv(hadron_model *model, const hadron_array *layers, uint64_t count, uint64_t blocks, uint64_t block_tokens,
                       char *error, uint64_t room);

/* Runs the forward pass of a step. On a GPU the call returns when the launches are submitted or captured. */
int32_t hadron_forward(hadron_model *model, const hadron_step *step, char *error, uint64_t room);

/* Computes logits: `hidden`, model dtype [rows, hidden_size], to `logits`, f32 [rows, vocab_size]. */
int32_t hadron_logits(hadron_model *model, uint64_t stream, const hadron_array *hidden, const hadron_array *logits, uint64_t rows,
                      char *error, uint64_t room);

/* Writes the counters of the model to `counters`. */
int32_t hadron_count(hadron_model *model, hadron_counters *counters, char *error, uint64_t room);

/* Frees the model, whose launches must have completed. Null is ignored. */
void hadron_close(hadron_model *model);

#ifdef __cplusplus
}
#endif

#endif
