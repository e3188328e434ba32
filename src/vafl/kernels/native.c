/* The loops of portable.py, each in one pass over its arrays. portable.py defines what each loop does.

   Arrays arrive by the buffer protocol. Every function checks types, shapes, alignment and, last, every index
   before it writes anything. So no arguments can make a loop read or write outside its arrays, as long as the
   arrays share no memory and no other thread changes them at the same time. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum {
    AHEAD = 12,          /* how many rows before its use a row is prefetched */
    NEAR_BYTES = 1024,   /* bytes of a row to prefetch (16 cache lines); the processor prefetches the rest itself */
    LONG_BYTES = 1 << 16 /* from this many bytes of work on, other Python threads may run: the GIL is released */
};

/* Loops that gain from wider vectors are compiled twice, and the loader chooses the version for the processor,
   if the C library supports that. AVX2 without FMA: a fused multiplication rounds once instead of twice, and the
   two versions would give different numbers. */
#if defined(__x86_64__) && defined(__GLIBC__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 6)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

/* --- arguments --- */

enum { STRIDED = PyBUF_STRIDES, CONTIGUOUS = PyBUF_C_CONTIGUOUS, WRITABLE = PyBUF_WRITABLE };

typedef struct {
    const char *types; /* format characters; NULL: any type but objects, whose references would be miscounted */
    int itemsize, axes, flags; /* itemsize 0: any size that `number` can read */
} Kind;

#define PLACES {"lq", 8, 1, CONTIGUOUS}
#define LABELS {"BHIlq", 0, 1, CONTIGUOUS}
#define FLOATS(axes, flags) {"f", 4, axes, flags}
#define ITERATIONS(axes, flags) {"i", 4, axes, flags}
#define SUMS(flags) {"d", 8, 2, STRIDED | flags}
#define ANYTHING(flags) {NULL, 0, 0, flags}

static int has_numbers(const Py_buffer *view)
{
    return view->itemsize == 1 || view->itemsize == 2 || view->itemsize == 4 || view->itemsize == 8;
}

/* Acquire the buffers of the first arguments, which must be arrays of these kinds. The caller reads the other
   arguments. Return 0 with an exception set if the number of arguments or an array is wrong. */
static int acquire(PyObject *const *given, Py_ssize_t count, Py_ssize_t expected, Py_buffer *views,
                   const Kind *kinds, int arrays)
{
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed. Found %zd.", expected, count);
        return 0;
    }
    for (int i = 0; i < arrays; i++) {
        Py_buffer *view = &views[i];
        const Kind *kind = &kinds[i];
        if (PyObject_GetBuffer(given[i], view, kind->flags | PyBUF_FORMAT) < 0) {
            view->obj = NULL;
            return 0;
        }
        if (kind->types == NULL) {
            if (!strchr(view->format, 'O'))
                continue;
            PyErr_Format(PyExc_TypeError, "argument %d must hold no objects. Found %s.", i + 1, view->format);
            return 0;
        }
        if (view->ndim != kind->axes || !strchr(kind->types, view->format[0])
            || view->format[1] || !(kind->itemsize ? view->itemsize == kind->itemsize : has_numbers(view))
            || (uintptr_t)view->buf % (size_t)view->itemsize
            || (kind->axes > 0 && view->strides[0] % view->itemsize)
            || (kind->axes == 2 && view->shape[1] > 1 && view->strides[1] != view->itemsize)) {
            PyErr_Format(PyExc_TypeError, "argument %d must have %d axes and be of type %s. Found %d, %s.",
                         i + 1, kind->axes, kind->types, view->ndim, view->format);
            return 0;
        }
    }
    return 1;
}

static void release(Py_buffer *views, int arrays)
{
    for (int i = 0; i < arrays; i++)
        if (views[i].obj)
            PyBuffer_Release(&views[i]);
}

static int of_one_shape(int same)
{
    if (!same)
        PyErr_SetString(PyExc_ValueError, "the arrays' shapes do not fit together.");
    return same;
}

/* Return an integer of any size as an unsigned one. A negative number becomes a huge one, so a check of the
   upper bound refuses it, too. */
static inline uint64_t number(const Py_buffer *view, Py_ssize_t i)
{
    switch (view->itemsize) {
    case 1: return ((const uint8_t *)view->buf)[i];
    case 2: return ((const uint16_t *)view->buf)[i];
    case 4: return ((const uint32_t *)view->buf)[i];
    default: return ((const uint64_t *)view->buf)[i];
    }
}

/* Return whether all of these indices are in 0..bound - 1. */
static int within(const Py_buffer *places, Py_ssize_t bound)
{
    uint64_t furthest = 0;
    for (Py_ssize_t i = 0; i < places->shape[0]; i++)
        furthest = number(places, i) > furthest ? number(places, i) : furthest;
    if (places->shape[0] && furthest >= (uint64_t)bound) {
        PyErr_Format(PyExc_IndexError, "every index must be below %zd. Found %lld.", bound, (long long)furthest);
        return 0;
    }
    return 1;
}

static int in_32_bits(long long number)
{
    if (number < INT32_MIN || number > INT32_MAX)
        PyErr_Format(PyExc_OverflowError, "an iteration, or a delay, has 32 bits. Found %lld.", number);
    return number >= INT32_MIN && number <= INT32_MAX;
}

static PyThreadState *begin(Py_ssize_t bytes)
{
    return bytes >= LONG_BYTES ? PyEval_SaveThread() : NULL;
}

static void end(PyThreadState *state)
{
    if (state)
        PyEval_RestoreThread(state);
}

/* --- rows --- */

static inline char *line(const Py_buffer *view, int64_t row)
{
    return (char *)view->buf + row * view->strides[0];
}

static inline void fetch(const char *row, Py_ssize_t bytes)
{
    for (Py_ssize_t at = 0; at < bytes && at < NEAR_BYTES; at += 64)
        __builtin_prefetch(row + at);
    __builtin_prefetch(row + bytes - 1);
}

static inline void copy_rows(const Py_buffer *from, const Py_buffer *rows, char *to, Py_ssize_t bytes)
{
    const int64_t *row = rows->buf;
    Py_ssize_t length = rows->shape[0];
    for (Py_ssize_t i = 0; i < length; i++, to += bytes) {
        if (i + AHEAD < length)
            fetch(line(from, row[i + AHEAD]), bytes);
        memcpy(to, line(from, row[i]), (size_t)bytes);
    }
}

static PyObject *gather(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static const Kind kinds[] = {ANYTHING(STRIDED), PLACES, ANYTHING(CONTIGUOUS | WRITABLE)};
    Py_buffer view[3] = {{0}}, *from = &view[0], *rows = &view[1], *out = &view[2];
    int done = acquire(given, count, 3, view, kinds, 3) && of_one_shape(from->ndim > 0 && from->ndim == out->ndim);
    Py_ssize_t bytes = from->itemsize;
    for (int axis = from->ndim - 1; done && axis > 0; axis--) {
        done = of_one_shape(from->shape[axis] < 2 || from->strides[axis] == bytes);
        bytes *= from->shape[axis];
    }
    done = done && of_one_shape(out->len == rows->shape[0] * bytes) && within(rows, from->shape[0]);
    if (done) {
        PyThreadState *state = begin(out->len);
        switch (bytes) { /* the compiler replaces a memcpy of constant size by a move */
        case 1: copy_rows(from, rows, out->buf, 1); break;
        case 2: copy_rows(from, rows, out->buf, 2); break;
        case 4: copy_rows(from, rows, out->buf, 4); break;
        case 8: copy_rows(from, rows, out->buf, 8); break;
        default: copy_rows(from, rows, out->buf, bytes);
        }
        end(state);
    }
    release(view, 3);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* Gather rows of float64 sums as float32. */
static PyObject *gather_sums(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static const Kind kinds[] = {SUMS(0), PLACES, FLOATS(2, CONTIGUOUS | WRITABLE)};
    Py_buffer view[3] = {{0}}, *sums = &view[0], *rows = &view[1], *out = &view[2];
    int done = acquire(given, count, 3, view, kinds, 3)
        && of_one_shape(out->shape[0] == rows->shape[0] && out->shape[1] == sums->shape[1])
        && within(rows, sums->shape[0]);
    if (done) {
        const int64_t *row = rows->buf;
        Py_ssize_t length = rows->shape[0], width = sums->shape[1];
        float *to = out->buf;
        PyThreadState *state = begin(out->len);
        for (Py_ssize_t i = 0; i < length; i++, to += width) {
            if (i + AHEAD < length)
                fetch(line(sums, row[i + AHEAD]), 8 * width);
            const double *sum = (const double *)line(sums, row[i]);
            for (Py_ssize_t j = 0; j < width; j++)
                to[j] = (float)sum[j];
        }
        end(state);
    }
    release(view, 3);
    return done ? Py_NewRef(Py_None) : NULL;
}

static void delays_at(const Py_buffer *stored_at, const Py_buffer *rows, uint32_t now, uint32_t *restrict to)
{
    const int64_t *row = rows->buf;
    Py_ssize_t length = rows->shape[0], clients = stored_at->shape[1];
    for (Py_ssize_t i = 0; i < length; i++, to += clients) {
        if (i + AHEAD < length)
            fetch(line(stored_at, row[i + AHEAD]), 4 * clients);
        const uint32_t *restrict then = (const uint32_t *)line(stored_at, row[i]);
        for (Py_ssize_t j = 0; j < clients; j++)
            to[j] = now - then[j]; /* unsigned, because signed overflow is undefined */
    }
}

typedef struct {
    int32_t longest, shortest; /* of the delays below `forever`, and of 0 */
} Range;

VECTORS static Range range_of(const int32_t *delay, Py_ssize_t length, int32_t forever)
{
    Range range = {0, 0};
    for (Py_ssize_t i = 0; i < length; i++) {
        int32_t known = delay[i] >= forever ? 0 : delay[i];
        range.longest = known > range.longest ? known : range.longest;
        range.shortest = known < range.shortest ? known : range.shortest;
    }
    return range;
}

static PyObject *count_delays(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static const Kind kinds[] = {ITERATIONS(2, STRIDED), PLACES, {"lq", 8, 2, CONTIGUOUS | WRITABLE}};
    Py_buffer view[3] = {{0}}, *stored_at = &view[0], *rows = &view[1], *counts = &view[2];
    int done = acquire(given, count, 6, view, kinds, 3)
        && of_one_shape(counts->shape[0] == stored_at->shape[1] && counts->shape[1] > 1);
    long long numbers[3] = {0}; /* iteration, own, forever */
    for (int i = 0; done && i < 3; i++) {
        numbers[i] = PyLong_AsLongLong(given[3 + i]);
        done = !PyErr_Occurred() && in_32_bits(numbers[i]);
    }
    done = done && within(rows, stored_at->shape[0]);
    Py_ssize_t length = done ? rows->shape[0] : 0, clients = done ? stored_at->shape[1] : 0;
    int32_t *delays = done ? PyMem_Calloc((size_t)length, (size_t)clients * sizeof(int32_t)) : NULL;
    if (done && !delays) {
        PyErr_NoMemory();
        done = 0;
    }
    Range range = {0, 0};
    if (done) {
        const int32_t *delay = delays, forever = (int32_t)numbers[2];
        int64_t *counted = counts->buf;
        Py_ssize_t bins = counts->shape[1];
        PyThreadState *state = begin(length * clients * 4);
        delays_at(stored_at, rows, (uint32_t)numbers[0], (uint32_t *)delays);
        range = range_of(delays, length * clients, forever);
        if (!range.shortest && range.longest < bins - 2)
            for (Py_ssize_t i = 0; i < length; i++)
                for (Py_ssize_t j = 0; j < clients; j++, delay++)
                    counted[j * bins + (j == numbers[1] ? 0 : *delay >= forever ? 1 : *delay + 2)]++;
        end(state);
    }
    PyMem_Free(delays);
    release(view, 3);
    if (range.shortest)
        PyErr_Format(PyExc_ValueError, "a delay must be 0 or more. Found %d.", (int)range.shortest);
    return done && !range.shortest ? PyLong_FromLong(range.longest) : NULL;
}

/* Replace `cell` by `fresh` and update `sum`. Return whether all values, old and new, are at most `largest`. */
static inline int change(double *restrict sum, float *restrict cell, const float *restrict fresh, Py_ssize_t width,
                         float largest)
{
    int exact = 1;
    for (Py_ssize_t j = 0; j < width; j++) {
        exact &= (fabsf(cell[j]) <= largest) & (fabsf(fresh[j]) <= largest);
        sum[j] = sum[j] - cell[j] + fresh[j];
        cell[j] = fresh[j];
    }
    return exact;
}

/* The loop of `store` and `store_summed`; `views` are those of `replace`. */
static inline int replace_rows(const Py_buffer *views, int summed, int32_t iteration, float largest)
{
    const Py_buffer *cells = &views[0], *stored_at = &views[1], *rows = &views[2], *fresh = &views[3];
    const Py_buffer *sums = &views[4];
    const int64_t *row = rows->buf;
    Py_ssize_t length = rows->shape[0], width = fresh->shape[1], bytes = width * (Py_ssize_t)sizeof(float);
    const float *to_come = fresh->buf;
    int exact = 1;
    for (Py_ssize_t i = 0; i < length; i++, to_come += width) {
        if (i + AHEAD < length) {
            fetch(line(cells, row[i + AHEAD]), bytes);
            fetch(line(stored_at, row[i + AHEAD]), sizeof(int32_t));
            if (summed)
                fetch(line(sums, row[i + AHEAD]), 2 * bytes);
        }
        float *cell = (float *)line(cells, row[i]);
        if (summed)
            exact &= change((double *)line(sums, row[i]), cell, to_come, width, largest);
        else
            memcpy(cell, to_come, (size_t)bytes);
        *(int32_t *)line(stored_at, row[i]) = iteration;
    }
    return exact;
}

static int replace_alone(const Py_buffer *views, int32_t iteration)
{
    return replace_rows(views, 0, iteration, 0);
}

VECTORS static int replace_summed(const Py_buffer *views, int32_t iteration, float largest)
{
    return replace_rows(views, 1, iteration, largest);
}

/* Check the arguments of `store` (four arrays, iteration) or `store_summed` (five arrays with the sums last,
   iteration, largest value), and run the loop. */
static PyObject *replace(PyObject *const *given, Py_ssize_t count, int arrays)
{
    static const Kind kinds[] = {FLOATS(2, STRIDED | WRITABLE), ITERATIONS(1, STRIDED | WRITABLE), PLACES,
                                 FLOATS(2, CONTIGUOUS), SUMS(WRITABLE)};
    Py_buffer view[5] = {{0}}, *cells = &view[0], *stored_at = &view[1], *rows = &view[2], *fresh = &view[3];
    Py_buffer *sums = arrays == 5 ? &view[4] : NULL;
    int done = acquire(given, count, arrays == 5 ? 7 : 5, view, kinds, arrays)
        && of_one_shape(cells->shape[1] == fresh->shape[1] && rows->shape[0] == fresh->shape[0]
                        && cells->shape[0] == stored_at->shape[0])
        && (!sums || of_one_shape(sums->shape[0] == cells->shape[0] && sums->shape[1] == cells->shape[1]));
    long long iteration = done ? PyLong_AsLongLong(given[arrays]) : 0;
    float largest = done && sums ? (float)PyFloat_AsDouble(given[6]) : 0;
    int exact = 1;
    done = done && !PyErr_Occurred() && in_32_bits(iteration) && within(rows, cells->shape[0]);
    if (done) {
        PyThreadState *state = begin(fresh->len);
        exact = sums ? replace_summed(view, (int32_t)iteration, largest) : replace_alone(view, (int32_t)iteration);
        end(state);
    }
    release(view, arrays);
    return done ? PyBool_FromLong(exact) : NULL;
}

static PyObject *store(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return replace(given, count, 4);
}

static PyObject *store_summed(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return replace(given, count, 5);
}

/* --- values --- */

static PyObject *add_row(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static const Kind kinds[] = {FLOATS(2, CONTIGUOUS | WRITABLE), FLOATS(1, CONTIGUOUS)};
    Py_buffer view[2] = {{0}}, *matrix = &view[0], *row = &view[1];
    int done = acquire(given, count, 2, view, kinds, 2) && of_one_shape(row->shape[0] == matrix->shape[1]);
    if (done) {
        const float *restrict added = row->buf;
        float *restrict value = matrix->buf;
        Py_ssize_t rows = matrix->shape[0], width = matrix->shape[1];
        PyThreadState *state = begin(matrix->len);
        for (Py_ssize_t i = 0; i < rows; i++, value += width)
            for (Py_ssize_t j = 0; j < width; j++)
                value[j] += added[j];
        end(state);
    }
    release(view, 2);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* Sum in float64, COLUMNS at a time, so that the sums stay in registers. */
static PyObject *sum_rows(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    enum { COLUMNS = 16 };
    static const Kind kinds[] = {FLOATS(2, CONTIGUOUS), FLOATS(1, CONTIGUOUS | WRITABLE)};
    Py_buffer view[2] = {{0}}, *matrix = &view[0], *out = &view[1];
    int done = acquire(given, count, 2, view, kinds, 2) && of_one_shape(out->shape[0] == matrix->shape[1]);
    if (done) {
        float *total = out->buf;
        Py_ssize_t rows = matrix->shape[0], width = matrix->shape[1];
        PyThreadState *state = begin(matrix->len);
        for (Py_ssize_t first = 0; first < width; first += COLUMNS) {
            Py_ssize_t columns = width - first < COLUMNS ? width - first : COLUMNS;
            double sum[COLUMNS] = {0};
            for (Py_ssize_t i = 0; i < rows; i++) {
                const float *row = (const float *)line(matrix, i) + first;
                for (Py_ssize_t j = 0; j < columns; j++)
                    sum[j] += row[j];
            }
            for (Py_ssize_t j = 0; j < columns; j++)
                total[first + j] = (float)sum[j];
        }
        end(state);
    }
    release(view, 2);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* --- losses --- */

/* Return e^x for x <= 0, within 2 units in the last place; NaN for NaN. x is split into a whole number of
   factors of 2 and a rest, and a polynomial (Cephes' coefficients) gives e^rest. Unlike expf, this has no call
   and no branch, so the compiler can vectorise the loop. */
static inline float power_of_e(float x)
{
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    float shifted = x * 1.44269504f + rounder, whole = shifted - rounder;
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    union {
        float value;
        uint32_t bits;
    } power = {shifted};
    power.bits = (power.bits + 127u) << 23; /* 2^whole; the shift drops the bits of the rounder */
    return x < -87.0f ? 0.0f : sum * power.value;
}

VECTORS static double softmax_rows(const Py_buffer *scores, const Py_buffer *labels, const float *weight,
                                   float *slopes)
{
    Py_ssize_t rows = scores->shape[0], classes = scores->shape[1];
    double loss = 0;
    for (Py_ssize_t i = 0; i < rows; i++) {
        const float *restrict score = (const float *)scores->buf + i * classes;
        float *restrict slope = slopes + i * classes, largest = score[0];
        for (Py_ssize_t j = 1; j < classes; j++)
            largest = score[j] > largest ? score[j] : largest;
        for (Py_ssize_t j = 0; j < classes; j++)
            slope[j] = score[j] - largest;
        loss -= (double)weight[i] * slope[number(labels, i)];
    }
    for (Py_ssize_t i = 0; i < rows * classes; i++)
        slopes[i] = power_of_e(slopes[i]);
    for (Py_ssize_t i = 0; i < rows; i++) {
        float *slope = slopes + i * classes, total = 0;
        for (Py_ssize_t j = 0; j < classes; j++)
            total += slope[j];
        float scale = weight[i] / total;
        for (Py_ssize_t j = 0; j < classes; j++)
            slope[j] *= scale;
        slope[number(labels, i)] -= weight[i];
        loss += (double)weight[i] * logf(total);
    }
    return loss;
}

static PyObject *softmax(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static const Kind kinds[] = {FLOATS(2, CONTIGUOUS), LABELS, FLOATS(1, CONTIGUOUS),
                                 FLOATS(2, CONTIGUOUS | WRITABLE)};
    Py_buffer view[4] = {{0}}, *scores = &view[0], *labels = &view[1], *weights = &view[2], *slopes = &view[3];
    int done = acquire(given, count, 4, view, kinds, 4)
        && of_one_shape(labels->shape[0] == scores->shape[0] && weights->shape[0] == scores->shape[0]
                        && slopes->shape[0] == scores->shape[0] && slopes->shape[1] == scores->shape[1])
        && within(labels, scores->shape[1]);
    double loss = 0;
    if (done) {
        PyThreadState *state = begin(scores->len);
        loss = softmax_rows(scores, labels, weights->buf, slopes->buf);
        end(state);
    }
    release(view, 4);
    return done ? PyFloat_FromDouble(loss) : NULL;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(gather),       FUNCTION(gather_sums), FUNCTION(count_delays), FUNCTION(store),
    FUNCTION(store_summed), FUNCTION(add_row),     FUNCTION(sum_rows),     FUNCTION(softmax),
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}
